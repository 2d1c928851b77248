#include "workspace.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "plan.h"

namespace bertopt_native {
namespace {

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Rows whose distance is a multiple of 1 KiB share a few sets of the first-level cache; those of a tile are read together.
size_t row_stride(size_t bytes) {
    const size_t stride = round_up(bytes, 64);
    return stride % 1024 ? stride : stride + 64;
}

}  // namespace

void Workspace::Release::operator()(uint8_t* p) const {
    if (mapped) munmap(p, mapped);
    else std::free(p);
}

uint8_t* Workspace::allocate(size_t bytes) {
#ifdef BN_EXACT  // each buffer exactly as long as it must be, so that a sanitiser sees a step beyond
    auto* p = static_cast<uint8_t*>(std::aligned_alloc(64, round_up(bytes, 64)));
    if (!p) throw std::bad_alloc();
    blocks_.push_back({p, Release{0}});
    return p;
#else
    constexpr size_t HUGE_PAGE = size_t{2} << 20;
    const size_t size = round_up(bytes, bytes < HUGE_PAGE / 8 ? 4096 : HUGE_PAGE);
    void* p = mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    auto* first = static_cast<uint8_t*>(p);
    auto* aligned = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<size_t>(p), HUGE_PAGE));
    if (aligned > first) munmap(first, static_cast<size_t>(aligned - first));
    if (const size_t rest = static_cast<size_t>(first + HUGE_PAGE - aligned)) munmap(aligned + size, rest);
    if (size >= HUGE_PAGE) madvise(aligned, size, MADV_HUGEPAGE);
    blocks_.push_back({aligned, Release{size}});
    return aligned;
#endif
}

Workspace::Workspace(const Network& n, const Kernel& kernel, size_t tokens, size_t longest)
    : tokens_(tokens), longest_(longest) {
    const size_t context = n.heads * n.head_stride, padded = round_up(longest, 32);
    work.inner.rows = std::min({kernel.chunk_rows, group_tokens(n) * 3 / 2, tokens});  // few groups are longer
    work.input_stride = row_stride(std::max({n.hidden, n.embedding, context}) * kernel.element_bytes);
    work.context_stride = row_stride(context * 4);
    work.inner.stride = row_stride(n.intermediate * kernel.element_bytes);
    work.inner.float_stride = row_stride(n.intermediate * 4) / 4;
    bool int8 = false, dense = n.projection != nullptr;
    for (size_t i = 0; i < n.layers; i++)
        for (const Linear* l : {&n.layer[i].qkv, &n.layer[i].attention_out, &n.layer[i].ffn_in, &n.layer[i].ffn_out})
            (l->int8 ? int8 : dense) = true;
    if (n.head)
        for (const Linear* l : {n.head->dense, n.head->decoder}) dense |= l && !l->int8;
    if (!dense) {  // quantised rows only
        work.input_stride = row_stride(std::max({n.hidden, n.embedding, context}) * kernel.int8_bytes);
        work.inner.stride = row_stride(n.intermediate * kernel.int8_bytes);
    }
    scratch.head_rows = tokens + 32;  // keys, and AMX's queries, are read in blocks of 32
    scratch.weight_stride = row_stride(padded * kernel.element_bytes);
    scratch.score_stride = padded + 16;

    // One mapping, cut up. In exact mode every buffer is its own.
    struct Buffer {
        uint8_t** place;
        size_t bytes;
    };
    uint8_t *hidden, *position, *text, *scale, *zero, *outliers, *excess, *inner, *scores, *row, *by_query, *by_key, *distance_scores;
    const Buffer buffers[] = {
        {&hidden, tokens * std::max(n.hidden, n.embedding) * 4},
        {&position, tokens * 4},
        {&text, n.head ? tokens * 4 : 0},
        {&work.input, tokens * work.input_stride},
        {&work.context, tokens * work.context_stride},
        {&scale, tokens * 4},
        {&zero, tokens * 4},
        {&outliers, tokens * OUTLIERS * 4},
        {&excess, tokens * OUTLIERS * 4},
        {&inner, int8 ? work.inner.rows * work.inner.float_stride * 4 : 64},
        {&work.inner.input, work.inner.rows * work.inner.stride},
        {&scratch.heads, 3 * scratch.head_rows * n.head_stride * kernel.element_bytes},
        {&scratch.keys, padded * n.head_stride * kernel.element_bytes},
        {&scratch.values, padded * n.head_stride * kernel.element_bytes},
        {&scratch.weights, QUERY_ROWS * scratch.weight_stride},
        {&scores, QUERY_ROWS * scratch.score_stride * 4},
        {&row, n.norm_first ? std::max(n.hidden, n.embedding) * 4 : 64},
        {&scratch.distance_keys, n.distances * n.head_stride * kernel.element_bytes},
        {&scratch.distance_queries, n.distances ? (n.distances + 32) * n.head_stride * kernel.element_bytes : 0},  // AMX reads blocks of 32
        {&by_query, n.distances ? QUERY_ROWS * BY_QUERY * 4 : 0},
        {&by_key, n.distances ? BY_KEY * PANEL * 4 : 0},
        {&distance_scores, n.distances ? QUERY_ROWS * scratch.score_stride * 4 : 0},
    };
#ifdef BN_EXACT
    for (const Buffer& b : buffers) *b.place = allocate(b.bytes);
#else
    size_t total = 0;
    for (const Buffer& b : buffers) total += round_up(b.bytes, 64) + 128;
    uint8_t* p = allocate(total);
    for (const Buffer& b : buffers) {
        *b.place = p;
        p += round_up(b.bytes, 64) + 128;
    }
#endif
    work.hidden = reinterpret_cast<float*>(hidden);
    work.position = reinterpret_cast<int32_t*>(position);
    work.text = reinterpret_cast<int32_t*>(text);
    work.row_scale = reinterpret_cast<float*>(scale);
    work.row_zero = reinterpret_cast<float*>(zero);
    work.row_outliers = reinterpret_cast<int32_t*>(outliers);
    work.row_excess = reinterpret_cast<float*>(excess);
    work.inner.floats = reinterpret_cast<float*>(inner);
    scratch.inner = work.inner;
    scratch.scores = reinterpret_cast<float*>(scores);
    scratch.row = reinterpret_cast<float*>(row);
    scratch.by_query = reinterpret_cast<float*>(by_query);
    scratch.by_key = reinterpret_cast<float*>(by_key);
    scratch.distance_scores = reinterpret_cast<float*>(distance_scores);
}

}  // namespace bertopt_native
