/* Every kernel for bfloat16. */
#define KUN_BF16
#include "typed.h"
#include "tile.h"
#include "linear.h"
#include "packed.h"
#include "rows.h"
#include "attention_span.h"
#include "soften_many.h"
#include "attention.h"
#include "reduce.h"
#include "experts.h"
#include "stage.h"
