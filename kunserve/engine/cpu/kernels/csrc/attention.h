/* Paged causal attention for decode and (chunked) prefill alike. Needs attention_span.h,
 * scores.h, soften.h, blend.h.
 *
 * A piece of work is a sequence with one kv head and a run of queries, or, where few queries read a
 * long context, with all kv heads: their keys lie side by side. Softmax is one over a segment of
 * SEGMENT absolute positions, and segments are added up in their order, whoever computed them: so
 * threads share the context of a lone decode, and no bit tells. */
#define SEGMENT 512 /* a multiple of SPAN */
#define WIDE_QUERIES 4
#define PIECES_PER_THREAD 4

INLINE void *carve(char **at, long bytes) {
  void *p = *at;
  *at += (bytes + 63) / 64 * 64;
  return p;
}

INLINE seen_keys carve_seen(char **at, long dim) {
  seen_keys seen;
  seen.acc = carve(at, MAX_ROWS * dim * 4);
  seen.peak = carve(at, MAX_ROWS * 4);
  seen.total = carve(at, MAX_ROWS * 4);
  return seen;
}

INLINE attention_buffers attention_scratch(int thread, long dim) {
  long span_bytes = SPAN * dim * (long)sizeof(elem), rows = MAX_ROWS;
  long spread_bytes = SPREAD_BYTES(rows * dim * (long)sizeof(elem));
  char *at = pool_scratch(thread, (size_t)(3 * span_bytes + spread_bytes +
                                           rows * (dim * 12 + SPAN * 8) + 8192));
  attention_buffers b;
  b.keys = carve(&at, span_bytes);
  b.values = carve(&at, span_bytes);
  b.q = carve(&at, rows * dim * (long)sizeof(elem));
  b.spread = carve(&at, spread_bytes);
  b.weights = carve(&at, rows * SPAN * (long)sizeof(weight));
  b.scores = carve(&at, rows * SPAN * 4);
  b.rescale = carve(&at, rows * 4);
  b.seen = carve_seen(&at, dim);
  b.before = carve_seen(&at, dim);
  b.room = carve(&at, span_bytes);
  return b;
}

/* The buffers from row `row` on. */
INLINE attention_buffers rows_from(const attention_buffers *b, long row, long dim) {
  attention_buffers some = *b;
  some.q += row * dim;
  some.spread += SPREAD_BYTES(row * dim * (long)sizeof(elem));
  some.weights += row * SPAN;
  some.scores += row * SPAN;
  some.rescale += row;
  some.seen.acc += row * dim;
  some.seen.peak += row;
  some.seen.total += row;
  return some;
}

INLINE void see_nothing(seen_keys *seen, long rows, long dim) {
  memset(seen->acc, 0, (size_t)(rows * dim) * 4);
  memset(seen->total, 0, (size_t)rows * 4);
  for (long row = 0; row < rows; row++) seen->peak[row] = -__builtin_inff();
}

/* Add what was seen of a segment to what was seen before it. Nothing seen changes nothing, and what
 * is seen first stays as it is. */
static void add_seen(const seen_keys *before, const seen_keys *seen, long rows, long dim) {
  for (long row = 0; row < rows; row++) {
    float past = before->peak[row], now = seen->peak[row], peak = past > now ? past : now;
    vf base = splat(peak == -__builtin_inff() ? 0.0f : peak);
    vf old = exp_vf(splat(past) - base), new = exp_vf(splat(now) - base);
    before->peak[row] = peak;
    before->total[row] = before->total[row] * old[0] + seen->total[row] * new[0];
    for (long d = row * dim; d < (row + 1) * dim; d += LANES) {
      vf sum = load_f32(before->acc + d) * old;
      store_f32(before->acc + d, sum + load_f32(seen->acc + d) * new);
    }
  }
}

/* What was seen of a segment belongs to what was seen before. */
INLINE void end_segment(attention_buffers *b, long rows, long dim) {
  if (b->has_before) {
    add_seen(&b->before, &b->seen, rows, dim);
    return;
  }
  seen_keys first = b->seen;
  b->seen = b->before;
  b->before = first;
  b->has_before = 1;
}

INLINE long rows_of(const attention_job *job, const attention_piece *piece) {
  return piece->queries * piece->num_kv_heads * (job->model->heads / job->model->kv_heads);
}

/* Bring in the queries: rows are ordered by kv head, then by query. */
static void open_piece(const attention_job *job, const attention_piece *piece,
                       attention_buffers *b) {
  const kun_model *model = job->model;
  long dim = model->head_dim, group = model->heads / model->kv_heads, rows = rows_of(job, piece);
  elem *to = b->q;
  for (long h = 0; h < piece->num_kv_heads; h++) {
    const elem *q = job->q + piece->token * job->q_stride + (piece->kv_head + h) * group * dim;
    for (long query = 0; query < piece->queries; query++, to += group * dim) {
      memcpy(to, q + query * job->q_stride, (size_t)(group * dim) * sizeof(elem));
    }
  }
#ifndef AMX_PRODUCTS
  if (piece->queries * group <= SPREAD_ROWS) {
    spread_rows(b->spread, (const char *)b->q, rows * dim * (long)sizeof(elem));
#if PIECE < LANES
  } else {
    for (long h = 0, per_head = piece->queries * group; h < piece->num_kv_heads; h++) {
      long from = h * per_head * dim;
      char *factors = b->spread + SPREAD_BYTES(from * (long)sizeof(elem));
      put_rows(factors, b->q + from, per_head, dim);
    }
#endif
  }
#endif
  see_nothing(&b->seen, rows, dim);
  b->has_before = 0;
}

/* Write the results out. */
static void write_results(const attention_job *job, const attention_piece *piece,
                          const seen_keys *seen) {
  long dim = job->model->head_dim, group = job->model->heads / job->model->kv_heads, row = 0;
  for (long head = piece->kv_head; head < piece->kv_head + piece->num_kv_heads; head++) {
    elem *out = job->out + piece->token * job->model->heads * dim + head * group * dim;
    for (long query = 0; query < piece->queries; query++, out += job->model->heads * dim) {
      for (long h = 0; h < group; h++, row++) {
        vf total = splat(seen->total[row]);
        for (long d = 0; d < dim; d += 2 * LANES) {
          const float *sum = seen->acc + row * dim + d;
          vf two[2] = {load_f32(sum) / total, load_f32(sum + LANES) / total};
          in_order(two);
          store(out + h * dim + d, two[0]);
          store(out + h * dim + d + LANES, two[1]);
        }
      }
    }
  }
}

/* How a step's attention is cut into pieces: the same for all layers. Those with a narrower window
 * than the plan was made for have fewer pieces. */
typedef struct attention_plan {
  long per_piece;      /* queries of a piece with one kv head */
  long split_over;     /* wide sequences of more keys than this are cut into segments */
  float *parts;        /* what was seen of each of these segments */
  atomic_int *arrived; /* [num_seqs] segments that are there; 0 between layers */
} attention_plan;

/* One sequence's pieces. */
typedef struct {
  long first_key; /* the first span that any of its queries sees */
  long pieces, part_rows;
  int is_wide, is_split;
} sequence_cut;

INLINE sequence_cut cut_sequence(const kun_model *model, const kun_batch *batch,
                                 const attention_plan *plan, long window, long s) {
  long queries = batch->q_starts[s + 1] - batch->q_starts[s], context = batch->context_lens[s];
  long hidden = window > 0 ? context - queries - window + 1 : 0;
  sequence_cut cut = {hidden > 0 ? hidden / SPAN * SPAN : 0, 0, 0, 0, 0};
  cut.is_wide = queries <= WIDE_QUERIES && queries * model->heads <= MAX_ROWS;
  cut.is_split = cut.is_wide && context > plan->split_over;
  if (queries == 0) return cut;
  if (cut.is_split) {
    cut.pieces = (context - 1) / SEGMENT - cut.first_key / SEGMENT + 1;
    cut.part_rows = cut.pieces * queries * model->heads;
  } else {
    long runs = (queries + plan->per_piece - 1) / plan->per_piece;
    cut.pieces = cut.is_wide ? 1 : runs * model->kv_heads;
  }
  return cut;
}

/* Called by one thread, before a barrier. */
static attention_plan plan_attention(const kun_model *model, const kun_batch *batch) {
  long group = model->heads / model->kv_heads, threads = kun_threads();
  long per_thread = batch->num_tokens * (long)model->kv_heads / (PIECES_PER_THREAD * threads);
  long least = FEW_ROWS / group, most = MAX_ROWS / group, wide_keys = 0, rows = 0;
  attention_plan plan = {per_thread < least ? least : per_thread > most ? most : per_thread,
                         INT64_MAX, NULL, NULL};
  if (threads == 1) return plan;
  for (long s = 0; s < batch->num_seqs; s++) {
    sequence_cut cut = cut_sequence(model, batch, &plan, model->window, s);
    if (cut.is_wide) wide_keys += batch->context_lens[s] - cut.first_key;
  }
  plan.split_over = wide_keys / (PIECES_PER_THREAD * threads);
  if (plan.split_over < SEGMENT) plan.split_over = SEGMENT;
  for (long s = 0; s < batch->num_seqs; s++) {
    rows += cut_sequence(model, batch, &plan, model->window, s).part_rows;
  }
  if (rows == 0) return plan;
  size_t counts = (size_t)(batch->num_seqs + 15) / 16 * 64;
  char *shared = pool_shared(POOL_ATTENTION, counts + (size_t)(rows * (model->head_dim + 2)) * 4);
  memset(shared, 0, counts);
  plan.arrived = (atomic_int *)shared;
  plan.parts = (float *)(shared + counts);
  return plan;
}

/* Work for one thread: pieces are numbered by sequence, then, with one kv head, by run of queries
 * (the last, which has most keys, first) and kv head. */
typedef struct {
  long sequence, before; /* `before` pieces belong to earlier sequences */
  long part_rows;        /* of earlier sequences */
} piece_cursor;

INLINE int take_piece(const attention_job *job, piece_cursor *at, attention_piece *piece) {
  const kun_model *model = job->model;
  const kun_batch *batch = job->batch;
  long taken = pool_take(), s;
  sequence_cut cut;
  for (;; at->sequence++, at->before += cut.pieces, at->part_rows += cut.part_rows) {
    s = at->sequence;
    if (s == batch->num_seqs) return 0;
    cut = cut_sequence(model, batch, job->plan, job->window, s);
    if (taken < at->before + cut.pieces) break;
  }
  long queries = batch->q_starts[s + 1] - batch->q_starts[s], nth = taken - at->before;
  long context = batch->context_lens[s], skip = 0;
  *piece = (attention_piece){.table = batch->tables + (long)batch->rows[s] * batch->max_blocks,
                             .sequence = s, .queries = queries, .num_kv_heads = model->kv_heads,
                             .from = cut.first_key, .context = context, .num_parts = cut.pieces};
  if (!cut.is_wide) {
    long per_piece = job->plan->per_piece;
    skip = (cut.pieces / model->kv_heads - 1 - nth / model->kv_heads) * per_piece;
    if (queries - skip < per_piece) piece->queries = queries - skip;
    else piece->queries = per_piece;
    piece->kv_head = nth % model->kv_heads;
    piece->num_kv_heads = 1;
  }
  piece->token = batch->q_starts[s] + skip;
  piece->first = context - queries + skip;
  piece->end = piece->first + piece->queries;
  if (!cut.is_wide && job->window > 0 && piece->first >= job->window) {
    piece->from = (piece->first - job->window + 1) / SPAN * SPAN;
  }
  if (cut.is_split) {
    long segment = cut.first_key / SEGMENT + nth;
    piece->parts = job->plan->parts + at->part_rows * (model->head_dim + 2);
    piece->part = nth;
    if (nth > 0) piece->from = segment * SEGMENT;
    if (nth < cut.pieces - 1) piece->end = (segment + 1) * SEGMENT;
  }
  return 1;
}

INLINE seen_keys part_of(const attention_piece *piece, long part, long rows, long dim) {
  float *at = piece->parts + part * rows * (dim + 2);
  return (seen_keys){at, at + rows * dim, at + rows * (dim + 1)};
}

/* The piece is computed: write its results, or leave its part to the thread that is the last of
 * the sequence. */
static void close_piece(const attention_job *job, const attention_piece *piece,
                        attention_buffers *b) {
  long dim = job->model->head_dim, rows = rows_of(job, piece);
  if (piece->parts == NULL) {
    end_segment(b, rows, dim);
    write_results(job, piece, &b->before);
    return;
  }
  seen_keys part = part_of(piece, piece->part, rows, dim);
  memcpy(part.acc, b->seen.acc, (size_t)(rows * dim) * 4);
  memcpy(part.peak, b->seen.peak, (size_t)rows * 4);
  memcpy(part.total, b->seen.total, (size_t)rows * 4);
  atomic_int *arrived = &job->plan->arrived[piece->sequence];
  if (atomic_fetch_add(arrived, 1) < piece->num_parts - 1) return;
  atomic_store(arrived, 0);
  seen_keys all = part_of(piece, 0, rows, dim);
  for (long i = 1; i < piece->num_parts; i++) {
    part = part_of(piece, i, rows, dim);
    add_seen(&all, &part, rows, dim);
  }
  write_results(job, piece, &all);
}

/* What a kv head's rows have seen grows by `count` values from `from` on. */
static void blend_span(const attention_job *job, const attention_piece *piece,
                       attention_buffers *b, const span_rows *values, fetch_list *list, long from,
                       long count) {
  long group = job->model->heads / job->model->kv_heads, rows = piece->queries * group;
  long dim = job->model->head_dim, first = first_seeing(piece, group, from);
  fetched_pair next[SPAN / PANEL], none[SPAN / PANEL];
  for (long i = 0; i < count / PANEL; i++) {
    next[i] = next_fetched(list, values->panels[i]);
    none[i] = (fetched_pair){values->panels[i], values->panels[i]};
  }
#ifdef AMX_PRODUCTS
  (void)none;
  amx_blend_span(b, piece, group, values, next, first, rows, dim, from, count);
#else
  int packs = rows - first > 2 * TILE_ROWS;
  if (packs) pack_values(b->values, values, next, dim, count);
  long most = packs ? PACKED_TILE_ROWS : TILE_ROWS;
  for (long row = first; row < rows; row += most) {
    int height = (int)(rows - row < most ? rows - row : most);
    long seen = keys_seen(piece, group, row + height - 1, from, count);
    if (packs) blend_packed(height, b, row, dim, seen);
    else blend_direct(height, b, values, row == first ? next : none, row, dim, seen);
  }
#endif
}

/* Positions [from, from + SPAN) for all rows of the piece. What `list` has is fetched meanwhile, as
 * much as is read here. */
static void attend_piece(const attention_job *job, const attention_piece *piece,
                         attention_buffers *b, long from, const span_place *place,
                         fetch_list *list) {
  long dim = job->model->head_dim;
  long per_head = piece->queries * (job->model->heads / job->model->kv_heads);
  long rows = per_head * piece->num_kv_heads;
  long reach = piece->first + piece->queries - from; /* keys that the last query sees */
  long count = reach >= SPAN ? SPAN : (reach + LANES - 1) / LANES * LANES;
  if (from % SEGMENT == 0 && from > piece->from) {
    end_segment(b, rows, dim);
    see_nothing(&b->seen, rows, dim);
  }
  for (long h = 0; h < piece->num_kv_heads; h++) {
    attention_buffers some = rows_from(b, h * per_head, dim);
    span_rows keys = rows_at(job, piece, place, 0, piece->kv_head + h, from, count, b->room);
    score_span(job, piece, &some, &keys, list, from, count);
  }
  if (job->model->score_cap > 0) cap_scores(job->model->score_cap, b->scores, rows, count);
  soften_rows(job, piece, b, per_head, from);
  for (long h = 0; h < piece->num_kv_heads; h++) {
    attention_buffers some = rows_from(b, h * per_head, dim);
    span_rows values = rows_at(job, piece, place, 1, piece->kv_head + h, from, count, b->room);
    blend_span(job, piece, &some, &values, list, from, count);
  }
}

/* Run inside a pool job; the caller puts a barrier before and after. The next piece is known while
 * one is computed, so that its first keys are fetched in time. */
static void attention_part(const attention_job *job, int thread) {
  piece_cursor cursor = {0, 0, 0};
  attention_piece pieces[2], *piece = &pieces[0], *following = &pieces[1];
  fetch_list list;
  long panel_bytes = PANEL * job->model->head_dim * (long)sizeof(elem);
  long soon = panel_bytes < NEAR_BYTES ? NEAR_BYTES / panel_bytes : 1;
  if (!take_piece(job, &cursor, piece)) return;
  attention_buffers b = attention_scratch(thread, job->model->head_dim);
  span_place place = find_span(job, piece, piece->from), next_place = place;
  for (int more = 1; more;) {
    more = take_piece(job, &cursor, following);
    open_piece(job, piece, &b);
    for (long from = piece->from; from < piece->end; from += SPAN) {
      const attention_piece *next = from + SPAN < piece->end ? piece : more ? following : NULL;
      list.num_far = list.num_near = list.current = 0;
      list_near(&list, job, piece, &place, soon, MAX_FETCHED);
      if (next != NULL) {
        next_place = find_span(job, next, next == piece ? from + SPAN : next->from);
        list_far(&list, job, next, &next_place);
        list_near(&list, job, next, &next_place, 0, soon);
      }
      attend_piece(job, piece, &b, from, &place, &list);
      place = next_place;
    }
    close_piece(job, piece, &b);
    attention_piece *done = piece;
    piece = following;
    following = done;
  }
}
