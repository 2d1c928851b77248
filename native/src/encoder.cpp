#include "encoder.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "cpu.h"
#include "errors.h"
#include "plan.h"
#include "pool.h"
#include "workspace.h"

namespace bertopt_native {
namespace {

std::string number(int64_t n) { return std::to_string(n); }

// Where padding ids do not advance the position: a position for every token, or nothing where no text has such an id, since then the
// rule is that of counting.
std::vector<int32_t> non_pad_positions(const Request& r, const Header& header) {
    const auto pad = static_cast<int32_t>(header.pad_id);
    if (std::find(r.ids, r.ids + r.tokens, pad) == r.ids + r.tokens) return {};
    std::vector<int32_t> positions(r.tokens);
    for (size_t i = 0; i < r.texts; i++) {
        auto next = static_cast<int32_t>(header.position_offset);
        for (auto t = static_cast<size_t>(r.starts[i]); t < static_cast<size_t>(r.starts[i + 1]); t++) positions[t] = r.ids[t] == pad ? pad : next++;
    }
    return positions;
}

}  // namespace

// A batch as groups of texts: each runs through all layers on the thread that took it.
class Groups final : public Job {
public:
    Groups(Encoder& encoder, const Batch& batch, const Plan& plan, bool (*interrupted)())
        : encoder_(encoder), batch_(batch), plan_(plan), interrupted_(interrupted), own_(encoder.borrow(plan.most_tokens, plan.longest)) {}

    void work(bool caller) noexcept override {
        if (caller) {
            take(*own_, interrupted_);
            encoder_.give_back(std::move(own_));
            return;
        }
        try {
            auto workspace = encoder_.borrow(plan_.most_tokens, plan_.longest);
            take(*workspace, nullptr);
            encoder_.give_back(std::move(workspace));
        } catch (const std::bad_alloc&) {  // the others do this thread's share
        }
    }

    bool stopped() const { return stop_.load(); }

private:
    void take(Workspace& w, bool (*interrupted)()) {
        using Clock = std::chrono::steady_clock;
        auto asked = Clock::now();
        const size_t groups = plan_.order.size();
        for (size_t n; !stop_.load(std::memory_order_relaxed) && (n = next_.fetch_add(1, std::memory_order_relaxed)) < groups;) {
            const size_t g = plan_.order[n];
            encoder_.kernel_.group(encoder_.model_.network(), batch_, plan_.bounds[g], plan_.bounds[g + 1], w.work, w.scratch, nullptr);
            // Asking takes the interpreter's lock, which another thread may hold for some milliseconds.
            if (interrupted && Clock::now() - asked > std::chrono::milliseconds(50)) {
                if (interrupted()) stop_.store(true);
                asked = Clock::now();
            }
        }
    }

    Encoder& encoder_;
    const Batch& batch_;
    const Plan& plan_;
    bool (*interrupted_)();
    std::unique_ptr<Workspace> own_;
    std::atomic<bool> stop_{false};
    std::atomic<size_t> next_{0};
};

// A small batch that all threads do together.
class Shared final : public Job {
public:
    Shared(Encoder& encoder, const Batch& batch, const Plan& plan, size_t threads)
        : encoder_(encoder), batch_(batch), plan_(plan), threads_(threads), shared_(encoder.borrow(plan.most_tokens, plan.longest)),
          steps_(24 + encoder.model_.network().layers * (16 + 4 * (plan.most_tokens / shared_->work.inner.rows + 1))) {}

    void work(bool caller) noexcept override {
        if (caller) return take(shared_->scratch);
        try {
            auto own = encoder_.borrow(plan_.most_tokens, plan_.longest);
            take(own->scratch);
            encoder_.give_back(std::move(own));
        } catch (const std::bad_alloc&) {
        }
    }

    void finish() { encoder_.give_back(std::move(shared_)); }

private:
    void take(const Scratch& scratch) {
        Team team{steps_.data(), 0, threads_};
        encoder_.kernel_.group(encoder_.model_.network(), batch_, plan_.bounds.front(), plan_.bounds.back(), shared_->work, scratch, &team);
    }

    Encoder& encoder_;
    const Batch& batch_;
    const Plan& plan_;
    size_t threads_;
    std::unique_ptr<Workspace> shared_;
    std::vector<Step> steps_;
};

Encoder::Encoder(const std::string& path, size_t threads, const std::string& isa, bool huge_pages)
    : model_(path, huge_pages), kernel_(choose_kernel(isa)), threads_(std::max<size_t>(1, threads)) {
    idle_.reserve(threads_);  // so that give_back, called where nothing may be thrown, does not allocate
}

Encoder::~Encoder() = default;

std::unique_ptr<Workspace> Encoder::borrow(size_t tokens, size_t longest) {
    std::unique_ptr<Workspace> w;
    {
        const std::lock_guard lock(process_lock());
        if (!idle_.empty()) {
            w = std::move(idle_.back());
            idle_.pop_back();
        }
    }
#ifndef BN_EXACT
    if (w && w->fits(tokens, longest)) return w;
    // A little more than asked for, so that batches that grow slowly do not allocate each time.
    tokens = (tokens + 127) / 128 * 128;
    longest = std::min(model_.network().longest, (longest + 127) / 128 * 128);
#endif
    w.reset();
    return std::make_unique<Workspace>(model_.network(), kernel_, tokens, longest);
}

void Encoder::give_back(std::unique_ptr<Workspace> workspace) {
    const std::lock_guard lock(process_lock());
    if (idle_.size() < threads_) idle_.push_back(std::move(workspace));
}

void Encoder::check(const Request& r) const {
    const Network& n = model_.network();
    if (over_vocabulary(r.output) && !n.head) throw BadInput("the file has no head over the vocabulary: pack with vocabulary_head=True");
    if (r.starts[0] != 0) throw BadInput("starts must begin with 0; got " + number(r.starts[0]));
    for (size_t i = 0; i < r.texts; i++) {
        if (r.starts[i + 1] < r.starts[i])
            throw BadInput("starts must not decrease; got " + number(r.starts[i]) + ", " + number(r.starts[i + 1]) + " for text " + number(static_cast<int64_t>(i)));
        if (static_cast<uint64_t>(r.starts[i + 1]) - static_cast<uint64_t>(r.starts[i]) > n.longest)
            throw BadInput("a text has at most " + number(static_cast<int64_t>(n.longest)) + " tokens; text " + number(static_cast<int64_t>(i)) +
                           " has " + number(r.starts[i + 1] - r.starts[i]) + ": truncate it");
    }
    if (static_cast<uint64_t>(r.starts[r.texts]) != r.tokens)
        throw BadInput("starts must end with the number of ids, " + number(static_cast<int64_t>(r.tokens)) + "; got " + number(r.starts[r.texts]));
    auto each = [&](const char* name, const int32_t* values, size_t limit) {
        const uint32_t most = static_cast<uint32_t>(std::min<size_t>(limit, uint32_t{1} << 31));
        uint32_t worst = 0;
        for (size_t i = 0; i < r.tokens; i++) worst = std::max(worst, static_cast<uint32_t>(values[i]));  // negative ones are huge
        if (worst < most) return;
        size_t i = 0;
        while (static_cast<uint32_t>(values[i]) < most) i++;
        throw BadInput(std::string(name) + " must be from 0 to " + number(static_cast<int64_t>(limit) - 1) + "; token " +
                       number(static_cast<int64_t>(i)) + " has " + number(values[i]));
    };
    each("ids", r.ids, n.vocabulary);
    if (r.token_types) each("token_types", r.token_types, std::max<size_t>(1, n.token_types));
    if (r.positions) each("positions", r.positions, n.positions);
}

size_t Encoder::width(Output output) const {
    return over_vocabulary(output) && model_.network().head ? model_.network().head->decoder->n : model_.network().hidden;
}

void Encoder::run(const Request& request, float* out, bool (*interrupted)()) {
    check(request);
    if (request.texts == 0) return;
    const Header& header = model_.header();
    Batch batch{request.ids, request.token_types, request.positions, request.starts, out, request.output, request.normalize};
    std::vector<int32_t> positions;
    if (!batch.positions && header.position_rule == static_cast<uint32_t>(PositionRule::non_pad)) {
        positions = non_pad_positions(request, header);
        if (!positions.empty()) batch.positions = positions.data();
    }
    const Plan plan = make_plan(model_.network(), request.starts, request.texts, threads_);
    if (plan.shared) {
        Shared job(*this, batch, plan, threads_);
        run_job(job, threads_ - 1);
        job.finish();
    } else {
        Groups job(*this, batch, plan, interrupted);
        run_job(job, std::min(threads_, plan.order.size()) - 1);
        if (job.stopped()) throw Interrupted{};
    }
}

}  // namespace bertopt_native
