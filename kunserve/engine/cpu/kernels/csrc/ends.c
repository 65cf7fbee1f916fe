/* A step's ends, the embedding and the output head, in the call that computes its layers. What
 * happens between two calls is short, and cold each time: caches hold weights. */
#include <stdint.h>
#include <string.h>

#include "api.h"

int32_t kun_pick_rows(const char *from, int64_t rows, int64_t panels, int64_t row_bytes,
                      const int32_t *which, int64_t n, char *to);
void kun_largest(const float *logits, float *pairs, int64_t rows, int64_t n, int64_t first);

#define DECLARE(T)                                                                              \
  void kun_stage_##T(const kun_model *, const kun_layer *, const kun_batch *,                   \
                     const kun_buffers *, int64_t, int64_t);                                    \
  void kun_rms_norm_##T(const void *, const void *, void *, int64_t, int64_t, float, int32_t);  \
  void kun_panel_linear_##T(const void *, const void *, const void *, void *, int64_t, int64_t, \
                            int64_t, int32_t, int64_t);                                         \
  void kun_packed_linear_##T(const void *, const kun_packed *, const void *, void *, int64_t,   \
                             int64_t, int64_t, int32_t, void *);

/* The largest logit of rows of `hidden`. */
#define HEAD(T)                                                                                 \
  void kun_head_##T(const void *hidden, const kun_ends *ends) {                                 \
    int64_t n = ends->num_sampled, width = ends->width;                                         \
    if (ends->sampled != NULL) {                                                                \
      for (int64_t i = 0; i < n; i++) {                                                         \
        memcpy((char *)ends->normed + i * ends->row_bytes,                                      \
               (const char *)hidden + ends->sampled[i] * ends->row_bytes,                       \
               (size_t)ends->row_bytes);                                                        \
      }                                                                                         \
      hidden = ends->normed;                                                                    \
    }                                                                                           \
    kun_rms_norm_##T(hidden, ends->norm, ends->normed, n, width, ends->eps, ends->norm_offset); \
    if (ends->packed != NULL) {                                                                 \
      kun_packed_linear_##T(ends->normed, ends->packed, NULL, ends->logits, n, ends->vocab,     \
                            width, KUN_FLOAT, ends->rounded);                                   \
    } else {                                                                                    \
      kun_panel_linear_##T(ends->normed, ends->head, NULL, ends->logits, n, ends->vocab, width, \
                           KUN_FLOAT, ends->head_panels);                                       \
    }                                                                                           \
    kun_largest(ends->logits, ends->pairs, n, ends->vocab, ends->first);                        \
  }

/* All layers between them; false if a token is none of the vocabulary's. */
#define WHOLE(T)                                                                                \
  int32_t kun_whole_##T(const kun_model *model, const kun_layer *layers,                        \
                        const kun_batch *batch, const kun_buffers *buffers, int64_t first,      \
                        int64_t end, const kun_ends *ends) {                                    \
    if (!kun_pick_rows(ends->embedding, ends->embedding_rows, ends->embedding_panels,           \
                       ends->row_bytes, ends->token_ids, batch->num_tokens, buffers->hidden)) { \
      return 0;                                                                                 \
    }                                                                                           \
    kun_stage_##T(model, layers, batch, buffers, first, end);                                   \
    kun_ends left = *ends;                                                                      \
    if (batch->kept != NULL) left.sampled = NULL; /* they are all there is */                   \
    if (left.num_sampled > 0) kun_head_##T(buffers->hidden, &left);                             \
    return 1;                                                                                   \
  }

DECLARE(bf16)
DECLARE(f32)
HEAD(bf16)
HEAD(f32)
WHOLE(bf16)
WHOLE(f32)
