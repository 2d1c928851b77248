#include "plan.h"

#include <algorithm>
#include <numeric>

namespace bertopt_native {
namespace {

constexpr size_t SHARED_MOST = 1024;  // tokens that threads do together; beyond, a whole text a thread is never far from even

// Consecutive texts to about `groups` groups of equal numbers of tokens.
void divide(const int64_t* starts, size_t texts, size_t groups, Plan& plan) {
    const auto tokens = static_cast<size_t>(starts[texts]);
    plan.bounds = {0};
    plan.most_tokens = 0;
    size_t from = 0;
    for (size_t i = 0; i < texts; i++) {
        const auto end = static_cast<size_t>(starts[i + 1]), begin = static_cast<size_t>(starts[from]);
        const size_t goal = tokens * plan.bounds.size() / groups;
        const size_t after = i + 1 < texts ? static_cast<size_t>(starts[i + 2]) : end;
        // Cut where the boundary is nearest to its goal.
        const bool cut = i + 1 == texts || end >= goal || after + end > 2 * goal + 1;
        if (!cut) continue;
        plan.most_tokens = std::max(plan.most_tokens, end - begin);
        plan.bounds.push_back(i + 1);
        from = i + 1;
    }
    const auto size = [&](size_t group) { return starts[plan.bounds[group + 1]] - starts[plan.bounds[group]]; };
    plan.order.resize(plan.bounds.size() - 1);
    std::iota(plan.order.begin(), plan.order.end(), size_t{0});
    std::stable_sort(plan.order.begin(), plan.order.end(), [&](size_t a, size_t b) { return size(a) > size(b); });
}

}  // namespace

Plan make_plan(const Network& network, const int64_t* starts, size_t texts, size_t threads) {
    const size_t most = group_tokens(network);
    Plan plan;
    const auto tokens = static_cast<size_t>(starts[texts]);
    for (size_t i = 0; i < texts; i++) plan.longest = std::max(plan.longest, static_cast<size_t>(starts[i + 1] - starts[i]));
    plan.longest = std::max<size_t>(plan.longest, 1);
    size_t groups = std::max<size_t>(1, (tokens + most - 1) / most);
    // Few groups: as many for each thread.
    if (groups < 8 * threads) groups = (groups + threads - 1) / threads * threads;
    divide(starts, texts, groups, plan);
    const size_t fair = (tokens + threads - 1) / threads;
    const size_t rounds = (plan.bounds.size() - 1 + threads - 1) / threads;
    const bool uneven = plan.bounds.size() - 1 < threads || plan.most_tokens * rounds > fair + fair / 6;
    if (threads > 1 && tokens > 0 && tokens <= SHARED_MOST && (uneven || tokens <= 96)) {
        plan.shared = true;
        plan.bounds = {0, texts};
        plan.most_tokens = tokens;
    }
    plan.most_tokens = std::max<size_t>(plan.most_tokens, 1);
    return plan;
}

}  // namespace bertopt_native
