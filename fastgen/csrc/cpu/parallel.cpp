// A thread pool for one recorded graph at a time. The schema is defined in fastgen/ops/runtime.py.
#include "parallel.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif
#include <pthread.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

// A thread polls for work this long before it sleeps, which is longer than the time between two operators of a graph.
constexpr std::chrono::microseconds kLooks{200};
// The polls between two reads of the clock. The length of a pause depends on the processor.
constexpr int kPauses = 32;
// The most threads of a pool: they live as long as the process.
constexpr int64_t kMostThreads = 1024;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Polls `done()` for at most kLooks. Returns its last value.
template <class Done>
bool look_for(const Done& done) {
  const auto until = std::chrono::steady_clock::now() + kLooks;
  do {
    for (int i = 0; i < kPauses; ++i) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  return done();
}

// The processor that the calling thread runs on; -1 if unknown.
int processor() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves the calling thread to another processor, if it may use one. A busy system tends to wake a thread on the
// processor of the thread that wakes it, and then each waits for the other to yield.
void leave(int processor) {
#ifdef __linux__
  cpu_set_t all, others;
  if (sched_getaffinity(0, sizeof(all), &all) != 0) return;
  others = all;
  CPU_CLR(processor, &others);
  if (CPU_COUNT(&others) != 0 && sched_setaffinity(0, sizeof(others), &others) == 0) {
    sched_setaffinity(0, sizeof(all), &all);
  }
#endif
}

// The calling thread is already running a part of a range.
thread_local bool inside = false;

// A thread, and the part of a range that it is to run. Whoever claims the part runs it: if the thread cannot, because
// another process has its processor or because it sleeps, the requesting thread does.
class Worker {
 public:
  // The thread decrements `left` after each part.
  explicit Worker(std::atomic<int64_t>& left) : left_(left) {
    std::thread thread([this] { work(); });
    handle_ = thread.native_handle();
    thread.detach();
  }

#ifdef __linux__
  void bind(const cpu_set_t& processors) { pthread_setaffinity_np(handle_, sizeof(processors), &processors); }
#endif

  void start(int64_t begin, int64_t end, fastgen::Range run, void* context, int starts_on) {
    begin_ = begin, end_ = end, run_ = run, context_ = context, starts_on_ = starts_on;
    const uint64_t number = number_.load() + 1;
    unclaimed_.store(number);
    // Either this sees that the thread sleeps, or the thread sees the new number before it sleeps.
    number_.store(number);
    if (sleeps_.load()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      woken_.notify_one();
    }
  }

  // Runs the part if it is unclaimed. The requesting thread calls this.
  bool run_unclaimed() {
    if (!claim(number_.load())) return false;
    run_(begin_, end_, context_);
    return true;
  }

  // Returns and clears the error of the last part.
  std::exception_ptr taken_error() { return std::exchange(error_, nullptr); }

 private:
  void work() {
    inside = true;
    for (uint64_t seen = 0;;) {
      if (!look_for([&] { return number_.load() != seen; })) sleep(seen);
      seen = number_.load();
      if (!claim(seen)) continue;
      if (starts_on_ >= 0 && starts_on_ == processor()) leave(starts_on_);
      try {
        run_(begin_, end_, context_);
      } catch (...) {
        error_ = std::current_exception();
      }
      left_.fetch_sub(1);
    }
  }

  // Claims the part of this number for the caller. No other part is written until it is done.
  bool claim(uint64_t number) { return unclaimed_.compare_exchange_strong(number, 0); }

  void sleep(uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleeps_.store(true);
    woken_.wait(lock, [&] { return number_.load() != seen; });
    sleeps_.store(false);
  }

  std::atomic<int64_t>& left_;
  std::thread::native_handle_type handle_;  // the thread never ends
  alignas(64) std::atomic<uint64_t> number_{0};  // of parts so far
  std::atomic<uint64_t> unclaimed_{0};           // number of the unclaimed part
  std::atomic<bool> sleeps_{false};
  int64_t begin_ = 0, end_ = 0;
  fastgen::Range run_ = nullptr;
  void* context_ = nullptr;
  int starts_on_ = -1;  // the processor of the requesting thread
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable woken_;
};

// The owning thread, and as many workers as have ever been requested.
class Team {
 public:
  // Makes the calling thread the owner of a pool with this many threads.
  void join(int64_t threads) {
    workers_.reserve(threads - 1);  // so that a started thread is never lost
    while (static_cast<int64_t>(workers_.size()) < threads - 1) workers_.push_back(std::make_unique<Worker>(left_));
    threads_ = threads;
    bind();
  }

  // Divides the range as torch does.
  void run(int64_t begin, int64_t end, int64_t grain, fastgen::Range run, void* context) {
    const int64_t count = end - begin, least = std::max<int64_t>(grain, 1);
    const int64_t parts = std::min(threads_, (count + least - 1) / least), size = (count + parts - 1) / parts;
    const int64_t others = (count + size - 1) / size - 1;
    const int here = processor();
    left_.store(others);
    for (int64_t i = 0; i < others; ++i) {
      const int64_t from = begin + (i + 1) * size;
      workers_[i]->start(from, std::min(from + size, end), run, context, here);
    }
    std::exception_ptr error;
    inside = true;
    try {
      run(begin, std::min(begin + size, end), context);
    } catch (...) {
      error = std::current_exception();
    }
    for (int64_t i = 0; i < others; ++i) {
      try {
        left_.fetch_sub(workers_[i]->run_unclaimed());
      } catch (...) {
        left_.fetch_sub(1);
        if (error == nullptr) error = std::current_exception();
      }
    }
    inside = false;
    const auto all_done = [&] { return left_.load() == 0; };
    // A thread that has lost its processor to another process may need this one.
    while (!all_done() && !look_for(all_done)) std::this_thread::yield();
    for (int64_t i = 0; i < others; ++i) {
      const std::exception_ptr other = workers_[i]->taken_error();
      if (error == nullptr) error = other;
    }
    if (error != nullptr) std::rethrow_exception(error);
  }

 private:
  // Lets the workers use the processors of the calling thread.
  void bind() {
#ifdef __linux__
    cpu_set_t now;
    if (sched_getaffinity(0, sizeof(now), &now) != 0 || CPU_EQUAL(&now, &processors_)) return;
    processors_ = now;
    for (const auto& worker : workers_) worker->bind(now);
#endif
  }

#ifdef __linux__
  cpu_set_t processors_{};
#endif
  int64_t threads_ = 1;
  std::vector<std::unique_ptr<Worker>> workers_;
  alignas(64) std::atomic<int64_t> left_{0};
};

// Never freed: its threads wait when the process ends.
Team* team = nullptr;
std::atomic<bool> is_taken{false};  // no lock: a fork could inherit it locked by a thread that it lacks
thread_local Team* own = nullptr;

// A fork has none of the pool's threads.
void forget_team() {
  team = own = nullptr;
  inside = false;
  is_taken.store(false);
}

// Registered when the library is loaded. A fork in the middle of a one-time initialisation at the first use would leave
// it unfinished in the child, which would wait for it forever.
const int forgets_at_fork = pthread_atfork(nullptr, nullptr, forget_team);

// See fastgen/ops/runtime.py.
bool take_team(int64_t threads) {
  if (threads < 2 || threads > kMostThreads || forgets_at_fork != 0 || own != nullptr || inside) return false;
  if (is_taken.exchange(true)) return false;
  try {
    if (team == nullptr) team = new Team;
    team->join(threads);
    own = team;
  } catch (const std::exception&) {  // no more threads or memory for this process: torch's threads serve
    is_taken.store(false);
  }
  return own != nullptr;
}

void give_team_back() {
  if (own == nullptr) return;
  own = nullptr;
  is_taken.store(false);
}

}  // namespace

namespace fastgen {

bool run_in_team(int64_t begin, int64_t end, int64_t grain, Range run, void* context) {
  if (inside) {  // a nested range
    if (begin < end) run(begin, end, context);
    return true;
  }
  if (own == nullptr) return false;
  if (begin < end) own->run(begin, end, grain, run, context);
  return true;
}

}  // namespace fastgen

// They have no tensors, so that no device chooses the kernel.
STABLE_TORCH_LIBRARY_IMPL(fastgen, CompositeExplicitAutograd, library) {
  library.impl("take_team", TORCH_BOX(&take_team));
  library.impl("give_team_back", TORCH_BOX(&give_team_back));
}
