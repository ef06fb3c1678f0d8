// Linear layers with int8 weights and activations: y[m][n] = scale[n] * what int8_products.h computes.
#include "int8_products.h"
#include "kernels.h"

LAMELLA_EXPORT void lamella_w8a8_linear(const float* x, const int8_t* panels, const float* scales, float* out,
                                        int64_t num_rows, int64_t num_columns, int64_t depth) {
    const int64_t num_panels = (num_columns + PANEL - 1) / PANEL, panel_bytes = lines_of(depth) * LINE_BYTES;
    const int64_t chunk = std::max<int64_t>(1, num_panels / (16 * omp_get_max_threads()));
    Activations activations(std::min(BLOCK_ROWS, num_rows), depth);
#pragma omp parallel
    {
        PanelSums product;
        for (int64_t first = 0; first < num_rows; first += BLOCK_ROWS) {
            const int64_t rows_here = std::min(BLOCK_ROWS, num_rows - first), tile_rows = even_tile(rows_here);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows_here; row += tile_rows)
                activations.quantize_tile(x + first * depth, depth, row, std::min(tile_rows, rows_here - row));
#pragma omp for schedule(dynamic, chunk)
            for (int64_t panel = 0; panel < num_panels; panel++) {
                product.multiply(panels + panel * panel_bytes, depth, rows_here, activations);
                const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, num_columns - column);
                for (int64_t row = 0; row < rows_here; row++) {
                    float values[PANEL];
                    for (int64_t lane = 0; lane < PANEL; lane += VEC_LANES)
                        store(values + lane, load(product.sums + row * PANEL + lane) * load(scales + column + lane));
                    std::memcpy(out + (first + row) * num_columns + column, values, width * sizeof(float));
                }
            }
        }
    }
}
