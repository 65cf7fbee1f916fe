/* Matrices into panels (panel_tile.h), in place, and rows out of them. */
#include "pool.h"
#include "vec.h"

#include "transpose.h"

#define SLOT 4 /* bytes of a row that lie together */

/* Where row i of a matrix with gate over up lies in files: panels are 8 rows of the first half over
 * 8 of the second, and rows that fill no panel stand behind them in the order that they had. */
INLINE long filed_row(long i, long rows) {
  long half = rows / 2, paired = rows / PANEL * 8; /* of each half */
  if (i < 2 * paired) return i / 8 % 2 * half + i / PANEL * 8 + i % 8;
  long left = half - paired, at = i - 2 * paired;
  return at / left * half + paired + at % left;
}

/* Put rows into the order in which panels have them, along the cycles of that permutation. `saved`
 * holds a row, `moved` a byte for each. */
static void interleave_halves(char *w, long rows, size_t bytes, char *saved, char *moved) {
  memset(moved, 0, (size_t)rows);
  for (long first = 0; first < rows; first++) {
    if (moved[first]) continue;
    memcpy(saved, w + (size_t)first * bytes, bytes);
    long to = first;
    for (long from = filed_row(to, rows); from != first; from = filed_row(to, rows)) {
      memcpy(w + (size_t)to * bytes, w + (size_t)from * bytes, bytes);
      moved[to] = 1;
      to = from;
    }
    memcpy(w + (size_t)to * bytes, saved, bytes);
    moved[to] = 1;
  }
}

/* What `kun_to_panels` works in, however many matrices there are: a panel, and a byte for each of
 * the matrix's rows. */
int64_t kun_arranging_bytes(int64_t rows, int64_t row_bytes) { return PANEL * row_bytes + rows; }

/* Each of the matrices becomes as many panels as its rows fill, and then the rest as it was. Where
 * they are paired, their first halves are gates. Whoever calls does it alone: steps that are
 * computed meanwhile have the pool. */
void kun_to_panels(char *w, int64_t matrices, int64_t rows, int64_t row_bytes, int32_t paired,
                   char *room) {
  int64_t panel_bytes = PANEL * row_bytes, full = rows / PANEL;
  const char *in_room[PANEL];
  for (int r = 0; r < PANEL; r++) in_room[r] = room + r * row_bytes;
  for (int64_t i = 0; i < matrices; i++, w += rows * row_bytes) {
    if (paired) interleave_halves(w, rows, (size_t)row_bytes, room, room + panel_bytes);
    for (int64_t panel = 0; panel < full; panel++) {
      memcpy(room, w + panel * panel_bytes, (size_t)panel_bytes);
      make_panel(w + panel * panel_bytes, in_room, row_bytes);
    }
  }
}

typedef struct {
  const char *from;
  int64_t panels, row_bytes;
  const int32_t *which;
  int64_t n;
  char *to;
} picked_rows;

static void pick_rows(const picked_rows *job, int64_t first, int64_t end) {
  int64_t bytes = job->row_bytes;
  for (int64_t i = first; i < end; i++) {
    int64_t row = job->which[i], panel = row / PANEL;
    char *to = job->to + i * bytes;
    if (panel >= job->panels) {
      memcpy(to, job->from + row * bytes, (size_t)bytes);
      continue;
    }
    const char *from = job->from + panel * PANEL * bytes + row % PANEL * SLOT;
    for (int64_t at = 0; at < bytes; at += SLOT) memcpy(to + at, from + at * PANEL, SLOT);
  }
}

static void pick_part(void *arg, int thread) {
  const picked_rows *job = arg;
  int64_t threads = kun_threads();
  pick_rows(job, job->n * thread / threads, job->n * (thread + 1) / threads);
}

#define FEW_PICKED 64 /* up to here one thread is done before others have woken up */

/* Rows of `from`, which begins with so many panels, one behind the other; false if one of them is
 * not there. A row in a panel is 4 bytes of each of its cache lines. */
int32_t kun_pick_rows(const char *from, int64_t rows, int64_t panels, int64_t row_bytes,
                      const int32_t *which, int64_t n, char *to) {
  picked_rows job = {from, panels, row_bytes, which, n, to};
  for (int64_t i = 0; i < n; i++) {
    if (which[i] < 0 || which[i] >= rows) return 0;
  }
  if (n <= FEW_PICKED) pick_rows(&job, 0, n);
  else pool_run(pick_part, &job);
  return 1;
}
