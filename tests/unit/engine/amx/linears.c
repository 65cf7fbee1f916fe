/* The products of bfloat16 alone: with pool.c and amx.c a library that is compiled in a second. */
#define KUN_BF16
#define AMX_LINEAR
#include "typed.h"
#include "transpose.h"
#include "factors.h"
#include "panel_tile.h"
#include "linear.h"
#include "amx_linear.h"
