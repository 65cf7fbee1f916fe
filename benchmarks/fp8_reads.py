"""What it costs a decode on a CPU to read KV in 8 bits instead of 16.

    python -m benchmarks.fp8_reads

The inner loop of attention for three query heads per KV head (SmolLM2's): each 32 elements of a key
meet three dot products in bfloat16. Once the elements are bfloat16, once they are fp8 (e4m3) and
are widened first, by four instructions. Both in turns, best of seven by processor time of the
thread, for contexts that fit each level of the cache. Needs AVX512-BF16 and gcc or clang.
"""

import argparse
import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.report import Report

SIZES = (8 << 10, 64 << 10, 512 << 10, 4 << 20, 64 << 20)
"""Elements."""
SOURCE = r"""
#include <immintrin.h>
#include <stdint.h>
#include <time.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* e4m3 as bfloat16 with another exponent: the seven bits go to 10..4, the sign to 15. The factor of
   2^120 belongs to the query. */
static inline __m512i widen(const uint8_t *p) {
  __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)p));
  __m512i bits = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x07f0));
  return _mm512_ternarylogic_epi32(bits, wide, _mm512_set1_epi16((short)0x8000), 0xf8);
}

void widen_some(const uint8_t *from, uint16_t *to) { _mm512_storeu_si512(to, widen(from)); }

#define DOTS(name, type, load)                                                          \
  static __attribute__((noinline)) float name(const type *k, long n, const __m512bh *q) { \
    __m512 a = _mm512_setzero_ps(), b = a, c = a;                                       \
    for (long i = 0; i < n; i += 64)                                                    \
      for (int j = 0; j < 2; j++) {                                                     \
        __m512bh v = (__m512bh)load;                                                    \
        a = _mm512_dpbf16_ps(a, v, q[j]);                                               \
        b = _mm512_dpbf16_ps(b, v, q[2 + j]);                                           \
        c = _mm512_dpbf16_ps(c, v, q[4 + j]);                                           \
      }                                                                                 \
    return _mm512_reduce_add_ps(_mm512_add_ps(a, _mm512_add_ps(b, c)));                 \
  }
DOTS(of_bf16, uint16_t, _mm512_loadu_si512(k + i + 32 * j))
DOTS(of_fp8, uint8_t, widen(k + i + 32 * j))

float measure(const uint16_t *bf16, const uint8_t *fp8, long n, long repeats, double *best) {
  __m512bh q[6];
  volatile float sum = 0;
  for (int i = 0; i < 6; i++) q[i] = (__m512bh)_mm512_set1_epi16(0x3f80);
  best[0] = best[1] = 1e9;
  for (int turn = 0; turn < 7; turn++) {
    double start = now();
    for (long i = 0; i < repeats; i++) sum += of_bf16(bf16, n, q);
    double middle = now();
    for (long i = 0; i < repeats; i++) sum += of_fp8(fp8, n, q);
    double end = now();
    if (middle - start < best[0]) best[0] = middle - start;
    if (end - middle < best[1]) best[1] = end - middle;
  }
  return sum;
}
"""


def _built(folder: Path) -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit("gcc or clang is needed")
    source, library = folder / "reads.c", folder / "reads.so"
    source.write_text(SOURCE)
    flags = ("-O3", "-march=native", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _check(library: ctypes.CDLL) -> None:
    """Every finite number of e4m3 is itself, but for the factor."""
    for first in range(0, 256, 32):
        wide = (ctypes.c_uint16 * 32)()
        library.widen_some(bytes(range(first, first + 32)), wide)
        for byte, bits in zip(range(first, first + 32), wide, strict=True):
            exponent, mantissa = byte >> 3 & 15, byte & 7
            sign = 1 - 2 * (byte >> 7)
            real = sign * 2.0 ** max(exponent - 7, -6) * (mantissa / 8 + (exponent > 0))
            has_exponent = bits >> 7 & 255
            size = 2.0 ** max(has_exponent - 127, -126) * ((bits & 127) / 128 + (has_exponent > 0))
            assert (1 - 2 * (bits >> 15)) * size * 2.0**120 == real, (byte, bits, real)


def main() -> None:
    """Print the ratios."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        raise SystemExit("this processor has no AVX512-BF16")
    with tempfile.TemporaryDirectory() as folder, Report("fp8_reads") as report:
        library = _built(Path(folder))
        _check(library)
        wide = (ctypes.c_uint16 * SIZES[-1])()
        narrow = (ctypes.c_uint8 * SIZES[-1])()
        best = (ctypes.c_double * 2)()
        for size in SIZES:
            repeats = max(1, (64 << 20) // size)
            library.measure(wide, narrow, ctypes.c_long(size), ctypes.c_long(repeats), best)
            report.add("fp8 / bfloat16, time", best[1] / best[0], "", elements=size)


if __name__ == "__main__":
    main()
