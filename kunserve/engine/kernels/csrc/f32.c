/* Every kernel for float32. */
#include "typed.h"
#include "tile.h"
#include "linear.h"
#include "packed.h"
#include "rows.h"
#include "attention_span.h"
#include "attention.h"
#include "stage.h"
