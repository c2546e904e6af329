#include "world.hpp"

#include <memory>

#include "fiber.hpp"

namespace kvferry::host {
namespace {

constexpr u64 kTurnNs = 20;         // a turn of one thread
constexpr u64 kIdleNs = 10000000;   // what the clock jumps by when nothing but polls happens
constexpr u64 kCopyUnit = 8;

class World;
struct Cta;

enum class State { kReady, kAtBarrier, kEnded };

struct Agent {
  World* world;
  Cta* cta;
  u32 thread;
  State state;
  Fiber fiber;
};

struct Launch;

struct Cta {
  Launch* launch;
  u32 block;
  std::vector<U128> shared;
  std::vector<Agent*> agents;
  u32 waiting = 0;
  u32 ended = 0;
  bool any = false;
  bool said = false;
  bool held = false;
};

struct Launch {
  u32 index;
  WorldOp* op;
  Body body;  // of a kernel
  u32 threads;
  u32 live = 0;  // CTAs
  bool held = false;
  bool decided = false;
  std::vector<std::unique_ptr<Cta>> ctas;
};

class World final : public Scheduler {
 public:
  World(const WorldRun& run, const Bodies& bodies) : run_(run), bodies_(bodies), random_(run.seed) {
    for (u64 r = 0; r < run.rank_count; ++r) {
      const WorldRank& rank = run.ranks[r];
      monitors_.push_back(
          std::make_unique<Monitor>(rank.regions, rank.region_count, run.enforce != 0, rank.report));
    }
    for (u64 i = 0; i < run.op_count; ++i) {
      launches_.push_back(std::make_unique<Launch>());
      launches_.back()->index = u32(i);
      launches_.back()->op = &run.ops[i];
      run.ops[i].ended = 0;
    }
    // How unkind this run is.
    hold_ = random() ? u32(random_() % 3) * 25 : 0;
    preempt_ = random() ? u32(random_() % 3) * 25 : 0;
    skew_ = random() && random_() % 2 == 0;
    host_.resize(run.event_count, false);
  }

  void run() {
    start_what_may();
    u64 quiet = 0, idle = 0;
    while (left_ < run_.op_count) {
      clock_ += kTurnNs;
      act_as_host();
      Agent* const agent = pick();
      progress_ = false;
      if (agent != nullptr) turn(*agent);
      quiet = progress_ ? 0 : quiet + 1;
      if (progress_) idle = 0;
      if (quiet <= 4 * ready_.size() + 64 && agent != nullptr) continue;
      quiet = 0;
      if (let_one_go()) continue;
      clock_ += kIdleNs;
      if (++idle > run_.max_idle) return give_up();
    }
  }

  void sync(u32, u32) override {
    Agent& agent = *current_;
    agent.state = State::kAtBarrier;
    agent.cta->waiting += 1;
    progress_ = true;
    forget(agent);
    release(*agent.cta);
    if (agent.state == State::kAtBarrier || random()) agent.fiber.yield();
  }

  bool sync_or(u32 block, u32 thread, bool mine) override {
    Cta& cta = *current_->cta;
    cta.any |= mine;
    sync(block, thread);
    return cta.said;
  }

  void poll(u32, u32) override { current_->fiber.yield(); }

  void preempt(bool stores) override {
    if (preempt_ != 0 && random_() % 100 < preempt_) current_->fiber.yield();
    if (stores) progress_ = true;
  }

  u64 clock() override { return clock_; }

 private:
  bool random() const { return run_.order == kRandom; }

  bool ended(u32 index) const { return index == kNoOp || run_.ops[index].ended != 0; }

  // An operation whose stream and dependency have come so far starts, unless it is held.
  void start_what_may() {
    for (const auto& launch : launches_) {
      const WorldOp& op = *launch->op;
      if (op.ended != 0 || !launch->ctas.empty() || !ended(op.after)) continue;
      bool first = true;
      for (u32 i = 0; i < launch->index; ++i) first &= run_.ops[i].stream != op.stream || run_.ops[i].ended != 0;
      if (!first) continue;
      if (!launch->decided) launch->held = chance();
      launch->decided = true;
      if (!launch->held) start(*launch);
    }
  }

  bool chance() { return hold_ != 0 && random_() % 100 < hold_; }

  void start(Launch& launch) {
    const WorldOp& op = *launch.op;
    const bool kernel = op.kind == kKernelOp;
    if (kernel) launch.body = bodies_(op);
    launch.threads = kernel ? op.nthreads : 1;
    launch.live = kernel ? op.nblocks : 1;
    for (u32 block = 0; block < launch.live; ++block) {
      auto cta = std::make_unique<Cta>();
      cta->launch = &launch;
      cta->block = block;
      cta->shared.resize((op.shared_bytes + 15) / 16);
      if (!cta->shared.empty()) std::memset(cta->shared.data(), kSharedPoison, cta->shared.size() * sizeof(U128));
      cta->held = kernel && chance();
      for (u32 thread = 0; thread < launch.threads; ++thread) cta->agents.push_back(fresh(*cta, thread));
      if (!cta->held) make_ready(*cta);
      launch.ctas.push_back(std::move(cta));
    }
    progress_ = true;
  }

  Agent* fresh(Cta& cta, u32 thread) {
    if (spare_.empty()) {
      agents_.push_back(std::make_unique<Agent>());
      spare_.push_back(agents_.back().get());
    }
    Agent* const agent = spare_.back();
    spare_.pop_back();
    agent->world = this;
    agent->cta = &cta;
    agent->thread = thread;
    agent->state = State::kReady;
    agent->fiber.start(&World::entry, agent);
    return agent;
  }

  void make_ready(Cta& cta) {
    for (Agent* agent : cta.agents) ready_.push_back(agent);
  }

  static void entry(void* argument) {
    auto* agent = static_cast<Agent*>(argument);
    agent->world->act(*agent);
  }

  void act(Agent& agent) {
    const Cta& cta = *agent.cta;
    const WorldOp& op = *cta.launch->op;
    Monitor& monitor = *monitors_[op.rank];
    HostCx cx(cta.block, op.nblocks, agent.thread, op.nthreads, const_cast<U128*>(cta.shared.data()), *this, monitor);
    if (op.kind == kKernelOp) {
      cta.launch->body(cx);
    } else {
      copy(op, cx, monitor);
    }
  }

  void copy(const WorldOp& op, HostCx& cx, Monitor& monitor) {
    for (u64 row = 0; row < op.rows; ++row) {
      const u64 src = op.src + row * op.src_pitch, dst = op.dst + row * op.dst_pitch;
      u64 unit = kCopyUnit;
      while (((src | dst | op.bytes) & (unit - 1)) != 0 || op.kind == kConsumeOp) {
        unit /= 2;
        if (unit == 1) break;
      }
      for (u64 at = 0; at < op.bytes; at += unit) {
        if (at % kCopyUnit == 0) current_->fiber.yield();
        progress_ = true;
        if (unit == 8) {
          cx.store<u64, Hint::kNone>(dst + at, cx.load<u64, Hint::kNone>(src + at));
        } else if (unit == 4) {
          cx.store<u32, Hint::kNone>(dst + at, cx.load<u32, Hint::kNone>(src + at));
        } else if (unit == 2) {
          cx.store<u16, Hint::kNone>(dst + at, cx.load<u16, Hint::kNone>(src + at));
        } else {
          cx.store<u8, Hint::kNone>(dst + at, cx.load<u8, Hint::kNone>(src + at));
        }
        if (op.kind != kConsumeOp) continue;
        u8* const counter = monitor.counter(src + at);
        cx.store<u8, Hint::kNone>(op.counts + row * op.bytes + at, counter == nullptr ? u8(255) : *counter);
        if (counter == nullptr) continue;
        *counter = 0;
        *reinterpret_cast<u8*>(src + at) = kConsumed;
      }
    }
  }

  Agent* pick() {
    if (ready_.empty()) return nullptr;
    if (run_.order == kForward || run_.order == kReversed) {
      at_ = at_ + 1 < ready_.size() ? at_ + 1 : 0;
      return ready_[run_.order == kForward ? at_ : ready_.size() - 1 - at_];
    }
    Agent* agent = ready_[random_() % ready_.size()];
    if (!skew_) return agent;
    if (random_() % 200 == 0) focus_ = u32(random_() % run_.rank_count);
    for (u32 i = 0; i < 6 && agent->cta->launch->op->rank != focus_; ++i) agent = ready_[random_() % ready_.size()];
    return agent;
  }

  void turn(Agent& agent) {
    current_ = &agent;
    if (!agent.fiber.resume()) return;
    progress_ = true;
    agent.state = State::kEnded;
    forget(agent);
    Cta& cta = *agent.cta;
    cta.ended += 1;
    release(cta);
    if (cta.ended < cta.launch->threads) return;
    for (Agent* spare : cta.agents) spare_.push_back(spare);
    Launch& launch = *cta.launch;
    if (--launch.live > 0) return;
    launch.op->ended = 1;
    left_ += 1;
    start_what_may();
  }

  void forget(Agent& agent) {
    const auto found = std::find(ready_.begin(), ready_.end(), &agent);
    if (found != ready_.end()) ready_.erase(found);
  }

  void release(Cta& cta) {
    const u32 threads = cta.launch->threads;
    if (cta.waiting == 0 || cta.waiting + cta.ended < threads) return;
    if (cta.ended > 0) fault(kBarrierDiverged, cta);
    cta.waiting = 0;
    cta.said = cta.any;
    cta.any = false;
    for (Agent* agent : cta.agents) {
      if (agent->state != State::kAtBarrier) continue;
      agent->state = State::kReady;
      ready_.push_back(agent);
    }
  }

  // Nothing moves: somebody who was held may.
  bool let_one_go() {
    std::vector<std::function<void()>> held;
    for (const auto& launch : launches_) {
      if (launch->held && launch->ctas.empty()) {
        held.push_back([this, &launch] {
          launch->held = false;
          start(*launch);
        });
      }
      for (const auto& cta : launch->ctas) {
        if (!cta->held) continue;
        held.push_back([this, &cta] {
          cta->held = false;
          make_ready(*cta);
        });
      }
    }
    if (held.empty()) return false;
    held[random_() % held.size()]();
    return true;
  }

  void act_as_host() {
    for (u64 i = 0; i < run_.event_count; ++i) {
      const WorldEvent& event = run_.events[i];
      if (host_[i] || event.at_ns > clock_) continue;
      host_[i] = true;
      std::memcpy(reinterpret_cast<void*>(event.address), &event.value, sizeof event.value);
    }
  }

  void fault(Fault kind, const Cta& cta) { monitors_[cta.launch->op->rank]->fault(kind, 0, cta.block, 0); }

  void give_up() {
    for (const auto& launch : launches_) {
      if (launch->op->ended == 0 && !launch->ctas.empty()) fault(kStuck, *launch->ctas.front());
    }
  }

  const WorldRun& run_;
  const Bodies& bodies_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Monitor>> monitors_;
  std::vector<std::unique_ptr<Agent>> agents_;  // stacks are used again
  std::vector<Agent*> spare_;
  std::vector<std::unique_ptr<Launch>> launches_;
  std::vector<Agent*> ready_;
  std::vector<bool> host_;
  Agent* current_ = nullptr;
  std::size_t at_ = 0;
  u64 clock_ = 1;
  u64 left_ = 0;
  u32 hold_ = 0;     // of 100
  u32 preempt_ = 0;  // of 100
  u32 focus_ = 0;
  bool skew_ = false;
  bool progress_ = false;
};

}  // namespace

void run_world(const WorldRun& run, const Bodies& bodies) { World(run, bodies).run(); }

}  // namespace kvferry::host
