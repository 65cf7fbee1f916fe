/* Matrices into panels (panel_tile.h), in place, and rows out of them. Whoever calls does it alone:
 * steps that are computed meanwhile have the pool. */
#include <stdlib.h>

#include "vec.h"

#include "transpose.h"

#define SLOT 4 /* bytes of a row that lie together */

/* Where rows of one of `matrices` matrices lie before and after: each begins with as many panels as
 * its rows fill, and then has the rest as it was. Where it is paired, a panel is 8 rows of the first
 * half over 8 of the second. */
typedef struct {
  char *w;
  long rows, row_bytes, paired;
} arranged;

INLINE long panels_of(const arranged *a) { return a->rows / PANEL; }

/* Row r of a panel, in the matrix as files have it. */
INLINE long row_of(const arranged *a, long panel, int r) {
  if (!a->paired) return panel * PANEL + r;
  return (r / 8) * (a->rows / 2) + panel * 8 + r % 8;
}

/* Rows behind the panels, as files have them: of paired ones both halves' ends, one by one. */
INLINE long rest_of(const arranged *a, long i) {
  long full = panels_of(a), left = a->rows / 2 - full * 8;
  if (!a->paired) return full * PANEL + i;
  return (i / left) * (a->rows / 2) + full * 8 + i % left;
}

static void into_panels(const arranged *a, const char *from) {
  const char *rows[PANEL];
  long bytes = a->row_bytes, full = panels_of(a);
  for (long panel = 0; panel < full; panel++) {
    for (int r = 0; r < PANEL; r++) rows[r] = from + row_of(a, panel, r) * bytes;
    make_panel(a->w + panel * PANEL * bytes, rows, bytes);
  }
  for (long i = 0; i < a->rows - full * PANEL; i++) {
    memcpy(a->w + (full * PANEL + i) * bytes, from + rest_of(a, i) * bytes, (size_t)bytes);
  }
}

/* One row out of a panel. */
INLINE void row_from_panel(char *to, const char *panel, int row, long row_bytes) {
  for (long at = 0; at < row_bytes; at += SLOT) {
    memcpy(to + at, panel + at * PANEL + row * SLOT, SLOT);
  }
}

static void out_of_panels(const arranged *a, const char *from) {
  long bytes = a->row_bytes, full = panels_of(a);
  for (long panel = 0; panel < full; panel++) {
    for (int r = 0; r < PANEL; r++) {
      row_from_panel(a->w + row_of(a, panel, r) * bytes, from + panel * PANEL * bytes, r, bytes);
    }
  }
  for (long i = 0; i < a->rows - full * PANEL; i++) {
    memcpy(a->w + rest_of(a, i) * bytes, from + (full * PANEL + i) * bytes, (size_t)bytes);
  }
}

/* As many bytes at a time as the change needs: a panel, where panels have consecutive rows, else a
 * matrix. False if there is no memory for a copy of so many. */
static int32_t change(char *w, int64_t matrices, int64_t rows, int64_t row_bytes, int32_t paired,
                      void (*how)(const arranged *, const char *)) {
  int64_t full = rows / PANEL;
  int64_t parts = paired ? matrices : matrices * full, part_rows = paired ? rows : PANEL;
  if (full == 0) return 1;
  char *copy = malloc((size_t)(part_rows * row_bytes));
  if (copy == NULL) return 0;
  for (int64_t i = 0; i < parts; i++) {
    int64_t first = paired ? i * rows : i / full * rows + i % full * PANEL;
    arranged a = {w + first * row_bytes, part_rows, row_bytes, paired};
    memcpy(copy, a.w, (size_t)(part_rows * row_bytes));
    how(&a, copy);
  }
  free(copy);
  return 1;
}

int32_t kun_to_panels(char *w, int64_t matrices, int64_t rows, int64_t row_bytes, int32_t paired) {
  return change(w, matrices, rows, row_bytes, paired, into_panels);
}

int32_t kun_from_panels(char *w, int64_t matrices, int64_t rows, int64_t row_bytes,
                        int32_t paired) {
  return change(w, matrices, rows, row_bytes, paired, out_of_panels);
}

/* Rows of `from`, which begins with so many panels, one behind the other; false if one of them is
 * not there. */
int32_t kun_pick_rows(const char *from, int64_t rows, int64_t panels, int64_t row_bytes,
                      const int32_t *which, int64_t n, char *to) {
  for (int64_t i = 0; i < n; i++, to += row_bytes) {
    int64_t row = which[i], panel = row / PANEL;
    if (row < 0 || row >= rows) return 0;
    if (panel >= panels) memcpy(to, from + row * row_bytes, (size_t)row_bytes);
    else row_from_panel(to, from + panel * PANEL * row_bytes, (int)(row % PANEL), row_bytes);
  }
  return 1;
}
