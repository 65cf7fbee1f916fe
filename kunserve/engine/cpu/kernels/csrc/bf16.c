/* Every kernel for bfloat16. */
#define KUN_BF16
#ifdef KUN_AMX
#define AMX_PRODUCTS
#endif
#include "typed.h"
#include "transpose.h"
#include "tile.h"
#include "factors.h"
#include "panel_tile.h"
#include "linear.h"
#ifdef AMX_PRODUCTS
#include "amx_linear.h"
#endif
#include "packed.h"
#include "rows.h"
#include "attention_span.h"
#include "spread.h"
#include "scores.h"
#include "soften.h"
#include "blend.h"
#ifdef AMX_PRODUCTS
#include "amx_attention.h"
#endif
#include "attention.h"
#include "reduce.h"
#include "experts.h"
#include "stage.h"
