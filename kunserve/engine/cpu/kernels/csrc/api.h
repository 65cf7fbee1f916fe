/* The structs that Python fills (kernels/library.py mirrors them field by field). */
#ifndef KUN_API_H
#define KUN_API_H

#include <stdint.h>

/* One layer's weights; a pointer is NULL where the model has no such tensor. */
typedef struct {
  const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias;
  const void *post_norm, *gate_up, *gate_up_bias, *down, *down_bias;
  /* In the place of gate_up and down: [experts][hidden], [experts][2 intermediate][hidden] and
   * [experts][hidden][intermediate]. */
  const void *router, *experts_gate_up, *experts_down;
  /* Of the shared expert, if there is one. The router's last row gives its weight. */
  const void *shared_gate_up, *shared_down;
  const void *attention_out_norm, *mlp_out_norm; /* of what is added to the residual stream */
  int32_t qkv_formats[3], o_format, gate_up_format, down_format;
  int32_t experts_gate_up_format, experts_down_format;
  int32_t shared_format; /* of both of its matrices */
  int32_t window; /* tokens that it sees, 0 if all */
  int32_t rope;   /* which table turns its heads */
} kun_layer;

/* How a matrix lies in memory: in the model's dtype, row after row or in panels (panel_tile.h), or
 * quantised in packed panels (panels.h). */
enum {
  KUN_PLAIN = 0,
  KUN_Q8_0 = 1,
  KUN_Q4_0 = 2,
  KUN_Q4_1 = 3,
  KUN_INT8 = 4,
  KUN_Q4_K = 5,
  KUN_Q6_K = 6,
  KUN_PANELS = 7
};

/* A matrix in packed panels: runs of rows, each of one format. For gate and up a panel is 8 rows of
 * the first half over 8 of the second, and `rows` counts the pairs. */
#define KUN_RUNS 3
typedef struct {
  const void *panels;
  int32_t runs;
  int32_t formats[KUN_RUNS], rows[KUN_RUNS];
} kun_packed;

typedef struct {
  int64_t unit_bytes;
  int32_t hidden, heads, kv_heads, head_dim, intermediate;
  int32_t block_size;
  int32_t window; /* the widest of any layer: tokens that it sees, 0 if all */
  float eps;
  float score_cap; /* 0 if scores are not capped */
  int32_t norm_offset; /* norms multiply by weight + 1 where it is 1 */
  int32_t gate;        /* KUN_SWIGLU or KUN_GEGLU */
  char *kv; /* unit 0 of layer 0 */
  int32_t experts, experts_per_token, normalises_experts; /* 0 if there are none */
  int32_t first_expert, held_experts; /* whose weights are here; all are, without ranks */
  int32_t shared; /* inner width of the shared expert, 0 if there is none */
  int32_t whole_qk_norm; /* q_norm and k_norm are over all heads at once */
  float score_scale; /* 0: the root of head_dim, inverted */
} kun_model;

/* One step. Sequence s has tokens [q_starts[s], q_starts[s + 1]), the last of its
 * context_lens[s] tokens; its block table is row rows[s] of `tables`. */
typedef struct {
  const int32_t *positions, *tables, *rows, *q_starts, *context_lens;
  const float *rope[2]; /* [position][cos | sin][head_dim / 2] each */
  int32_t num_tokens, num_seqs, max_blocks;
  const int32_t *local_tables; /* as `tables`, for layers with a window; NULL: the same */
  /* Rows of which alone the last layer is wanted, ascending; NULL: all. `hidden` then begins with
   * them, side by side, and what is behind them is undefined. Only without ranks. */
  const int32_t *kept;
  int32_t num_kept;
} kun_batch;

/* This process as one of several that compute a stage together (ranks.h). */
typedef struct {
  void *meeting;       /* shared by all ranks */
  void *parts;         /* shared, float32 [size][num_tokens][hidden]: each rank's part of a sum */
  int64_t patience_ns; /* how long to wait for a rank before it counts as lost */
  int32_t rank, size;
  int32_t lost; /* set for good once a rank is lost */
} kun_ranks;

/* Activations, in the model's dtype, [num_tokens][...]. */
typedef struct {
  void *hidden; /* [hidden] in and out: the residual stream */
  void *normed; /* [hidden] */
  void *qkv;    /* [(heads + 2 * kv_heads) * head_dim] */
  void *mixed;  /* [heads * head_dim] attention output */
  void *gated;  /* [intermediate], once for each expert of a token; then [shared] */
  void *rounded; /* 64 bytes for each 32 elements of the widest of these; for packed weights only */
  void *routing; /* see experts.h; for experts only */
  float *sums;   /* [hidden]; for experts only */
  kun_ranks *ranks; /* NULL: this process computes alone. Else `hidden` and `normed` are shared. */
} kun_buffers;

/* A step's embedding and output head, for kun_whole and kun_head. */
typedef struct {
  const void *embedding; /* [embedding_rows] of row_bytes each; begins with so many panels */
  int64_t embedding_rows, embedding_panels, row_bytes;
  const int32_t *token_ids; /* [num_tokens] */
  const int32_t *sampled;   /* [num_sampled] rows of `hidden`; NULL: all of them, in order */
  int64_t num_sampled;
  const void *norm, *head;  /* `head` is [vocab][width], or NULL */
  int64_t head_panels;      /* with which it begins */
  const kun_packed *packed; /* the same in panels, or NULL */
  int64_t vocab, width;
  int64_t first; /* which token the first logit is of */
  void *normed, *rounded;
  float *logits; /* [num_sampled][vocab] */
  float *pairs;  /* [num_sampled][2], see kun_largest */
  float eps;
  int32_t norm_offset;
} kun_ends;

/* How `kun_linear` finishes an output. */
enum {
  KUN_STORE = 0,    /* y = x w^T + bias */
  KUN_RESIDUAL = 1, /* y = y + (x w^T + bias) */
  KUN_SWIGLU = 2,   /* w is [gate | up]: y = silu(x gate^T) * (x up^T), n columns each */
  KUN_FLOAT = 3,    /* y in float32, unrounded */
  KUN_WEIGHTED = 4, /* row i of x: row to[i] of y, in float32, += by[i] * (x w^T) */
  KUN_GEGLU = 5     /* as KUN_SWIGLU, with GELU (by tanh) for SiLU */
};

#endif
