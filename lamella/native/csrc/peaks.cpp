// What the machine can do at best: the ceilings that benchmarks compare with.
#include <omp.h>

#include "vec.h"

// Fused multiply-adds a second that all threads reach together, in GFLOP/s (two operations each).
LAMELLA_EXPORT double lamella_peak_gflops(int64_t num_iterations) {
    constexpr int CHAINS = 12;
    const double start = omp_get_wtime();
    int num_threads = 1;
#pragma omp parallel
    {
#pragma omp single
        num_threads = omp_get_num_threads();
        Vec chains[CHAINS];
#pragma GCC unroll 12  // like every loop over the chains: one that is not unrolled would keep them in memory
        for (int chain = 0; chain < CHAINS; chain++) chains[chain] = broadcast(1.5f + float(chain));
        const Vec factor = broadcast(0.999f), term = broadcast(1e-3f);
        for (int64_t iteration = 0; iteration < num_iterations; iteration++) {
#pragma GCC unroll 12
            for (int chain = 0; chain < CHAINS; chain++) chains[chain] = fma(chains[chain], factor, term);
            asm volatile("" ::: "memory");
        }
        float sum = 0;
#pragma GCC unroll 12
        for (int chain = 0; chain < CHAINS; chain++) sum += sum_lanes(chains[chain]);
        asm volatile("" : : "m"(sum));  // it is used, as far as the compiler can tell
    }
    const double seconds = omp_get_wtime() - start;
    return double(num_iterations) * CHAINS * VEC_LANES * 2 * num_threads / seconds / 1e9;
}

// Bytes a second that all threads read from `data` together, in GB/s. If that is larger than the caches, it is the rate
// of the DRAM.
LAMELLA_EXPORT double lamella_read_gbps(const float* data, int64_t num_floats) {
    constexpr int64_t BLOCK = 16384;
    constexpr int CHAINS = 8;
    const double start = omp_get_wtime();
    double total = 0;
#pragma omp parallel for reduction(+ : total) schedule(static)
    for (int64_t block = 0; block < num_floats / BLOCK; block++) {
        Vec chains[CHAINS] = {};
        const float* from = data + block * BLOCK;
        for (int64_t index = 0; index < BLOCK; index += CHAINS * VEC_LANES)
            for (int chain = 0; chain < CHAINS; chain++) chains[chain] += load(from + index + chain * VEC_LANES);
        for (int chain = 0; chain < CHAINS; chain++) total += sum_lanes(chains[chain]);
    }
    const double seconds = omp_get_wtime() - start;
    volatile double sink = total;
    (void)sink;
    return double(num_floats / BLOCK * BLOCK) * 4 / seconds / 1e9;
}
