// The bookkeeping of a search step, on the CPU, in the buffers of the search. The schemas are defined in
// fastgen/ops/search_step.py. The rules and names are those of fastgen/decoding/captured/search.py, which explains
// them; this code works element by element.
#include "operator.h"
#include "topk.h"

namespace {

using namespace fastgen;

constexpr float kNever = -1.0e9f;
// The largest positions and counts that are added up.
constexpr int64_t kFarthest = int64_t{1} << 60;
enum EarlyStopping : int64_t { kIfNoneIsBetter = 0, kAtOnce = 1, kNeverEarly = 2 };

// Returns the data of a tensor after checking its shape and type.
template <typename T>
T* checked(const Tensor& tensor, std::initializer_list<int64_t> sizes, const char* name) {
  return fastgen::checked<T>(tensor, sizes, "search_step: wrong shape, type or layout of ", name);
}

// The common state of all searches: the progress of the sequences, and which are finished. Pointers into the buffers.
struct Progress {
  int64_t batch, per_input, width;
  const int64_t* limit;
  int64_t* length;
  int64_t* taken;
  bool* unfinished;
  bool* done;
  const bool* has_nan;

  Progress(const Tensor& sequences, const Tensor& limits, const Tensor& lengths, const Tensor& takens,
           const Tensor& goes_on, const Tensor& is_done, const Tensor& nan_flag) {
    STD_TORCH_CHECK(sequences.dim() == 3, "search_step: sequences must be [batch, per input, positions]");
    batch = sequences.size(0), per_input = sequences.size(1), width = sequences.size(2);
    limit = checked<const int64_t>(limits, {batch, per_input}, "limit");
    length = checked<int64_t>(lengths, {batch, per_input}, "length");
    taken = checked<int64_t>(takens, {batch, per_input}, "taken");
    unfinished = checked<bool>(goes_on, {batch, per_input}, "unfinished");
    done = checked<bool>(is_done, {}, "done");
    has_nan = checked<const bool>(nan_flag, {}, "has_nan");
  }

  // Returns whether the next token is the last one within the limit, or beyond it.
  bool is_last(int64_t row) const { return sum_of(length[row], 1) >= limit[row]; }

  // Returns whether a sequence changes: not at its limit, nor after the end of the search.
  bool moves(int64_t row) const { return !*done && length[row] < limit[row]; }

  void go_on(int64_t row, bool moves) {
    taken[row] = moves;
    length[row] += moves;
  }

  void end_step() {
    const bool* end = unfinished + batch * per_input;
    *done = *done || std::find(const_cast<const bool*>(unfinished), end, true) == end || *has_nan;
  }
};

// The tokens that end a sequence.
struct Ends {
  const int64_t* eos;
  int64_t count;
  const bool* stops;

  Ends(const Tensor& tokens, const std::optional<Tensor>& stop, int64_t numbers)
      : eos(checked<const int64_t>(tokens, {tokens.numel()}, "eos")), count(tokens.numel()),
        stops(stop.has_value() ? checked<const bool>(*stop, {numbers}, "stops") : nullptr) {}

  bool operator()(int64_t token, int64_t number) const {
    return (stops && stops[number]) || std::find(eos, eos + count, token) != eos + count;
  }
};

void take_rows_(Tensor tokens, std::optional<Tensor> stops, Tensor eos, Tensor limit, Tensor has_nan,
                Tensor running_sequences, Tensor next_tokens, Tensor length, Tensor taken, Tensor unfinished,
                Tensor done) {
  Arguments("search_step")
      .writes(running_sequences, next_tokens, length, taken, unfinished, done)
      .reads(tokens, stops, eos, limit, has_nan);
  Progress progress(running_sequences, limit, length, taken, unfinished, done, has_nan);
  const int64_t rows = progress.batch * progress.per_input, width = progress.width;
  int64_t* sequences = checked<int64_t>(running_sequences, {progress.batch, progress.per_input, width}, "sequences");
  const int64_t* token = checked<const int64_t>(tokens, {rows}, "tokens");
  int64_t* next = checked<int64_t>(next_tokens, {rows}, "the next tokens");
  const Ends ends(eos, stops, rows);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = progress.length[row];
    const bool moves = progress.moves(row);
    if (ends(token[row], row) || progress.is_last(row)) progress.unfinished[row] = false;
    if (moves) {
      if (at >= 0 && at < width) sequences[row * width + at] = token[row];
      next[row] = token[row];
    }
    progress.go_on(row, moves);
  }
  progress.end_step();
}

// Extends a row by its first chosen tokens: those that equal the draft, up to the first difference, and one more.
void commit_(Tensor chosen, std::optional<Tensor> counts, Tensor accepted, std::optional<Tensor> near, Tensor near_ties,
               Tensor eos, Tensor fill, Tensor limit, Tensor has_nan, Tensor running_sequences, Tensor next_tokens,
               Tensor length, Tensor taken, Tensor unfinished, Tensor done, bool together) {
  Arguments("search_step")
      .writes(accepted, near_ties, running_sequences, next_tokens, length, taken, unfinished, done)
      .reads(chosen, counts, near, eos, fill, limit, has_nan);
  Progress progress(running_sequences, limit, length, taken, unfinished, done, has_nan);
  const int64_t rows = progress.batch * progress.per_input, capacity = progress.width;
  int64_t* sequences = checked<int64_t>(running_sequences, {progress.batch, progress.per_input, capacity}, "sequences");
  STD_TORCH_CHECK(chosen.dim() == 2 && chosen.size(1) >= 1, "search_step: the chosen tokens must be [rows, width]");
  const int64_t width = chosen.size(1);
  const int64_t* choice = checked<const int64_t>(chosen, {rows, width}, "the chosen tokens");
  const int64_t* drafted = counts ? checked<const int64_t>(*counts, {rows}, "counts") : nullptr;
  const bool* is_near = near ? checked<const bool>(*near, {rows, width}, "near") : nullptr;
  int64_t* kept = checked<int64_t>(accepted, {rows}, "accepted");
  int64_t* ties = checked<int64_t>(near_ties, {}, "near_ties");
  int64_t* next = checked<int64_t>(next_tokens, {rows}, "the next tokens");
  const int64_t* filler = checked<const int64_t>(fill, {rows}, "fill");
  const Ends ends(eos, std::nullopt, 0);
  const std::vector<int64_t> before(progress.length, progress.length + rows);  // the used values must be checked
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = before[row];
    STD_TORCH_CHECK(at >= 1 && at + (drafted ? width - 1 : 0) <= capacity, "search_step: a length behind the buffer");
    STD_TORCH_CHECK(at <= progress.limit[row] || !progress.unfinished[row], "search_step: a length behind the limit");
    STD_TORCH_CHECK(drafted || (kept[row] >= 0 && kept[row] < width), "search_step: more are accepted than there are");
  }

  const bool was_done = *progress.done;
  std::vector<int64_t> count(rows);
  int64_t fewest = width;
  const auto has_ended = [&](int64_t row) {
    const int64_t* token = choice + row * width;
    return std::any_of(token, token + count[row], [&](int64_t each) { return ends(each, 0); });
  };
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t *token = choice + row * width, *draft = sequences + row * capacity + before[row];
    if (drafted) {
      int64_t same = 0;
      while (same < std::min(width - 1, drafted[row]) && draft[same] == token[same]) ++same;
      kept[row] = same;
    }
    int64_t before_end = 0;  // tokens up to and including the first EOS
    while (before_end < width && (before_end == 0 || !ends(token[before_end - 1], 0))) ++before_end;
    const int64_t room = difference_of(progress.limit[row], before[row]);
    count[row] = std::max<int64_t>(std::min({kept[row] + 1, before_end, room}), 0);
    const bool goes_on = progress.unfinished[row] && !was_done;
    if (goes_on && !has_ended(row)) fewest = std::min(fewest, count[row]);
  }
  for (int64_t row = 0; row < rows; ++row) {
    if (together) count[row] = std::min(count[row], fewest);
    if (!progress.unfinished[row] || was_done) count[row] = 0;
    const int64_t *token = choice + row * width, at = before[row], end = at + count[row];
    if (has_ended(row) || end >= progress.limit[row]) progress.unfinished[row] = false;
    int64_t* sequence = sequences + row * capacity;
    for (int64_t i = 0; i < count[row] && at + i < capacity; ++i) {
      sequence[at + i] = token[i];
      if (is_near) *ties += is_near[row * width + i];
    }
    std::fill(sequence + std::min(std::max(end, at), capacity), sequence + capacity, filler[row]);
    progress.taken[row] = count[row];
    progress.length[row] = end;
    next[row] = sequence[std::clamp<int64_t>(end - 1, 0, capacity - 1)];
  }
  progress.end_step();
}

// Sequences of an input, with a value for each position, before and after a step.
template <typename T>
struct Histories {
  T *running, *finished;
  int64_t beams, width;
  std::vector<T> before{};

  // Running sequence j continues candidate chosen[j], and finished sequence j becomes kept[j]: a previous one, or a
  // candidate. Candidate c has added[c] at position `at`. After it, all sequences of an input have equal contents.
  void take(int64_t input, const std::vector<Candidate>& chosen, const std::vector<Candidate>& kept,
            const int64_t* parents, const std::vector<T>& added, int64_t at) {
    const int64_t count = std::clamp<int64_t>(at, 0, width);
    T* to_running = running + input * beams * width;
    T* to_finished = finished + input * beams * width;
    before.clear();
    for (const T* from : {to_running, to_finished}) {
      for (int64_t j = 0; j < beams; ++j) before.insert(before.end(), from + j * width, from + j * width + count);
    }
    const auto put = [&](T* to, int64_t candidate) {
      std::copy_n(before.begin() + parents[candidate] * count, count, to);
      if (at >= 0 && at < width) to[at] = added[candidate];
    };
    for (int64_t j = 0; j < beams; ++j) {
      put(to_running + j * width, chosen[j].index);
      const int64_t from = kept[j].index;
      if (from >= beams) put(to_finished + j * width, from - beams);
      else std::copy_n(before.begin() + (beams + from) * count, count, to_finished + j * width);
    }
  }
};

void take_beams_(Tensor candidate_scores, Tensor candidate_beams, Tensor candidate_tokens, std::optional<Tensor> stops,
                 Tensor eos, Tensor penalties, Tensor favours_length, Tensor is_real, Tensor limit, Tensor has_nan,
                 Tensor running_sequences, Tensor running_indices, Tensor running_scores, Tensor sequences,
                 Tensor indices, Tensor scores, Tensor finished, Tensor improvable, Tensor next_tokens, Tensor parents,
                 Tensor length, Tensor taken, Tensor unfinished, Tensor done, Tensor prompt, int64_t early_stopping) {
  Arguments("search_step")
      .writes(running_sequences, running_indices, running_scores, sequences, indices, scores, finished, improvable,
              next_tokens, parents, length, taken, unfinished, done)
      .reads(candidate_scores, candidate_beams, candidate_tokens, stops, eos, penalties, favours_length, is_real, limit,
             has_nan, prompt);
  Progress progress(running_sequences, limit, length, taken, unfinished, done, has_nan);
  const int64_t prompt_capacity = *checked<const int64_t>(prompt, {}, "prompt");
  const int64_t batch = progress.batch, beams = progress.per_input, width = progress.width;
  STD_TORCH_CHECK(candidate_scores.dim() == 2 && running_indices.dim() == 3 && penalties.dim() == 2,
                  "search_step: wrong shapes");
  const int64_t count = candidate_scores.size(1), steps = running_indices.size(2), lengths = penalties.size(1);
  STD_TORCH_CHECK(count >= beams && beams >= 1 && lengths >= 1, "search_step: fewer candidates than beams");
  const float* of_candidate = checked<const float>(candidate_scores, {batch, count}, "candidates' scores");
  const int64_t* of_beams = checked<const int64_t>(candidate_beams, {batch, count}, "candidates' beams");
  const int64_t* token = checked<const int64_t>(candidate_tokens, {batch, count}, "candidates' tokens");
  const float* penalty = checked<const float>(penalties, {batch, lengths}, "penalties");
  const bool* favours = checked<const bool>(favours_length, {batch, 1}, "favours_length");
  const bool* real = checked<const bool>(is_real, {batch, 1}, "is_real");
  float* running = checked<float>(running_scores, {batch, beams}, "running_scores");
  float* best = checked<float>(scores, {batch, beams}, "scores");
  bool* is_finished = checked<bool>(finished, {batch, beams}, "finished");
  bool* can_improve = checked<bool>(improvable, {batch, 1}, "improvable");
  int64_t* next = checked<int64_t>(next_tokens, {batch * beams}, "the next tokens");
  int64_t* parent = checked<int64_t>(parents, {batch * beams}, "parents");
  Histories<int64_t> tokens{checked<int64_t>(running_sequences, {batch, beams, width}, "running_sequences"),
                            checked<int64_t>(sequences, {batch, beams, width}, "sequences"), beams, width};
  Histories<int32_t> rows{checked<int32_t>(running_indices, {batch, beams, steps}, "running_indices"),
                          checked<int32_t>(indices, {batch, beams, steps}, "indices"), beams, steps};
  const std::vector<int64_t> beam(of_beams, of_beams + batch * count);  // a copy: the used values must be checked
  STD_TORCH_CHECK(std::all_of(beam.begin(), beam.end(), [&](int64_t b) { return b >= 0 && b < beams; }),
                  "search_step: a candidate of a beam that is not there");
  const Ends is_end(eos, stops, batch * count);

  std::vector<char> ends(batch * count);
  bool all_end = true;
  for (int64_t number = 0; number < batch * count; ++number) {
    const int64_t input = number / count;
    ends[number] = is_end(token[number], number) || progress.is_last(input * beams);
    all_end = all_end && (ends[number] || !real[input]);
  }

  std::vector<Candidate> chosen, kept;
  std::vector<int64_t> added_tokens(count);
  std::vector<int32_t> added_rows(count);
  std::vector<char> now_finished(beams);
  for (int64_t input = 0; input < batch; ++input) {
    const int64_t first = input * beams, at = progress.length[first], last = progress.limit[first];
    const int64_t step = difference_of(at, prompt_capacity), generated_now = sum_of(step, 1);
    const char* ends_now = ends.data() + input * count;
    const auto per_length = [&](float score, int64_t generated) {
      return score / penalty[input * lengths + std::clamp<int64_t>(generated, 0, lengths - 1)];
    };

    // The continuing sequences.
    chosen.clear();
    for (int64_t c = 0; c < count; ++c) {
      const float score = of_candidate[input * count + c];
      chosen.push_back({ends_now[c] ? score + kNever : score, c});
    }
    topk(chosen, beams, is_one_pass(beams, count));

    // The finished sequences.
    const bool* were_finished = is_finished + first;
    const bool had_all = std::all_of(were_finished, were_finished + beams, [](bool each) { return each; });
    kept.clear();
    for (int64_t j = 0; j < beams; ++j) kept.push_back({best[first + j], j});
    for (int64_t c = 0; c < count; ++c) {
      float score = per_length(of_candidate[input * count + c], generated_now);
      if (early_stopping == kAtOnce && had_all) score += kNever;
      if (!can_improve[input]) score += kNever;
      if (!ends_now[c] || c >= beams) score += kNever;
      kept.push_back({score, beams + c});
    }
    topk(kept, beams, is_one_pass(beams, beams + count));
    for (int64_t j = 0; j < beams; ++j) {
      const int64_t from = kept[j].index;
      now_finished[j] = from < beams ? were_finished[from] : ends_now[from - beams] && from - beams < beams;
    }

    // Can a running sequence still become better than a finished one?
    const bool hopes_for_all = early_stopping == kNeverEarly && favours[input];
    const float hoped = per_length(
        chosen[0].score, hopes_for_all ? difference_of(last, prompt_capacity) : generated_now);
    const float worst = kept[beams - 1].score;
    bool hopes = false, has_all = true;
    for (int64_t j = 0; j < beams; ++j) {
      hopes = hopes || hoped > (now_finished[j] ? worst : kNever);
      has_all = has_all && now_finished[j];
    }
    can_improve[input] = can_improve[input] && hopes;
    const bool goes_on =
        can_improve[input] && !progress.is_last(first) && !all_end && !(early_stopping == kAtOnce && has_all);
    std::fill_n(progress.unfinished + first, beams, goes_on);

    const bool moves = progress.moves(first);
    if (moves) {
      for (int64_t c = 0; c < count; ++c) {
        added_tokens[c] = token[input * count + c];
        added_rows[c] = static_cast<int32_t>(first + beam[input * count + c]);
      }
      tokens.take(input, chosen, kept, beam.data() + input * count, added_tokens, at);
      rows.take(input, chosen, kept, beam.data() + input * count, added_rows, step);
    }
    for (int64_t j = 0; j < beams; ++j) {
      parent[first + j] = first + j;
      progress.go_on(first + j, moves);
      if (!moves) continue;
      running[first + j] = chosen[j].score;
      best[first + j] = kept[j].score;
      is_finished[first + j] = now_finished[j];
      next[first + j] = added_tokens[chosen[j].index];
      parent[first + j] = added_rows[chosen[j].index];
    }
  }
  progress.end_step();
}

// Writes ones at the positions [at, end) of a mask's row.
template <typename T>
void mark(const Tensor& mask, int64_t row, int64_t at, int64_t end) {
  T* first = numbers_of<T>(mask) + row * mask.size(1);
  std::fill(first + at, first + end, T{1});
}

void advance_(std::optional<Tensor> parents, Tensor taken, Tensor stored_positions, Tensor numbers,
              std::optional<Tensor> ancestry, Tensor seen, std::vector<Tensor> positions, std::vector<Tensor> masks,
              int64_t width) {
  Arguments("search_step").writes(numbers, ancestry, seen, positions, masks).reads(parents, taken, stored_positions);
  const int64_t stored = *checked<const int64_t>(stored_positions, {}, "stored");
  STD_TORCH_CHECK(numbers.dim() == 2 && numbers.size(0) >= 1 && numbers.size(1) >= 1,
                  "search_step: numbers must be [width + 1, rows]");
  STD_TORCH_CHECK(width >= 0, "search_step: a width below zero");
  // The first rows' elements of a table with more rows: the stride between elements is its number of rows.
  const int64_t rows = numbers.size(1), each_row = numbers.size(0), apart = numbers.stride(0);
  STD_TORCH_CHECK(numbers.scalar_type() == ScalarType::Long && (numbers.stride(1) == 1 || rows == 1) && apart >= rows,
                  "search_step: wrong shape, type or layout of numbers");
  int64_t* number = numbers_of<int64_t>(numbers);
  const int64_t* count = checked<const int64_t>(taken, {rows}, "taken");
  int64_t* longest = checked<int64_t>(seen, {}, "seen");
  std::vector<int64_t> parent;  // a copy: the used values must be the checked ones
  int32_t* table = nullptr;
  int64_t capacity = 0;
  if (parents.has_value() && ancestry.has_value()) {
    STD_TORCH_CHECK(ancestry->dim() == 2, "search_step: the ancestry must be [rows, capacity]");
    capacity = ancestry->size(1);
    table = checked<int32_t>(*ancestry, {rows, capacity}, "ancestry");
    const int64_t* first = checked<const int64_t>(*parents, {rows}, "parents");
    parent.assign(first, first + rows);
    STD_TORCH_CHECK(std::all_of(parent.begin(), parent.end(), [&](int64_t p) { return p >= 0 && p < rows; }),
                    "search_step: a parent that is not there");
  }
  for (const Tensor& each : positions) checked<int64_t>(each, {rows, 1}, "positions");
  for (const Tensor& each : masks) {
    const ScalarType type = each.scalar_type();
    STD_TORCH_CHECK(each.dim() == 2 && each.size(0) == rows && each.is_contiguous() &&
                        (type == ScalarType::Long || type == ScalarType::Int || type == ScalarType::Float ||
                         type == ScalarType::Bool),
                    "search_step: a mask must be [rows, positions] of int64, int32, float32 or bool");
  }

  const auto all_below = [](const int64_t* numbers, int64_t some) {
    return std::all_of(numbers, numbers + some, [](int64_t each) { return each >= -kFarthest && each <= kFarthest; });
  };
  bool fit = all_below(&stored, 1) && all_below(&width, 1) && all_below(count, rows);
  for (int64_t i = 0; i < each_row; ++i) fit = fit && all_below(number + i * apart, rows);
  for (const Tensor& each : positions) fit = fit && all_below(numbers_of<const int64_t>(each), rows);
  STD_TORCH_CHECK(fit, "search_step: a position or a count beyond ", kFarthest);

  const int64_t longest_before = *std::max_element(number, number + rows);
  for (int64_t i = 0; i < each_row; ++i) {
    for (int64_t row = 0; row < rows; ++row) number[i * apart + row] += count[row];
  }
  const int64_t longest_now = *std::max_element(number, number + rows);
  *longest = stored + longest_now;
  // Beyond the longest row, each position belongs to the row itself.
  const int64_t reach = std::clamp<int64_t>(std::max(longest_before, longest_now), 0, capacity);
  std::vector<int32_t> before;
  for (int64_t row = 0; table && row < rows; ++row) {
    before.insert(before.end(), table + row * capacity, table + row * capacity + reach);
  }
  for (int64_t row = 0; table && row < rows; ++row) {
    const int64_t own = std::clamp<int64_t>(number[row], 0, reach);
    std::copy_n(before.begin() + parent[row] * reach, own, table + row * capacity);
    std::fill(table + row * capacity + own, table + row * capacity + reach, static_cast<int32_t>(row));
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (const Tensor& each : positions) numbers_of<int64_t>(each)[row] += count[row];
    const int64_t at = stored + number[row];
    for (const Tensor& mask : masks) {
      if (at < 0 || at >= mask.size(1)) continue;
      const int64_t end = std::min(at + width, mask.size(1));
      switch (mask.scalar_type()) {
        case ScalarType::Long: mark<int64_t>(mask, row, at, end); break;
        case ScalarType::Int: mark<int32_t>(mask, row, at, end); break;
        case ScalarType::Float: mark<float>(mask, row, at, end); break;
        default: mark<bool>(mask, row, at, end);
      }
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastgen, CPU, library) {
  library.impl("take_rows_", FASTGEN_PLANNED(take_rows_));
  library.impl("commit_", FASTGEN_PLANNED(commit_));
  library.impl("take_beams_", FASTGEN_PLANNED(take_beams_));
  library.impl("advance_", FASTGEN_PLANNED(advance_));
}
