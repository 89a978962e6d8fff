// Ranks as threads that exchange drawn routes through exchange.cpp, with pauses drawn at every step of
// the protocol, and compare all that comes with a loop. Values are small whole numbers, so sums are
// exact in any order.
//
// With SHARED 1 all ranks use one mapping of a memory, so that a thread sanitizer sees who touches it;
// with 0 each maps it for itself, as processes do.
//
//     stress RANKS PASSES SEED SHARED        exit code 1 and a line of words where something is wrong

#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>

#include "../../../distributed/symmetric/exchange.cpp"

namespace {

thread_local std::mt19937_64 pauses;
std::atomic<int> faults{0};

int64_t drawn(std::mt19937_64& random, int64_t end) { return static_cast<int64_t>(random() % end); }

struct Barrier {
  std::atomic<int> came{0};
  void wait(int num_ranks) {
    came.fetch_add(1);
    while (came.load() < num_ranks) std::this_thread::yield();
  }
};

struct Meeting {
  bool shared;
  std::vector<int> files;
  std::vector<Exchange*> exchanges;
  Barrier created, connected, done;
};

#define EXPECT(truth, ...)                     \
  if (!(truth)) {                              \
    std::fprintf(stderr, __VA_ARGS__);         \
    std::fprintf(stderr, "\n");                \
    faults.fetch_add(1);                       \
    return;                                    \
  }

void wait(Exchange* exchange, uint32_t number) {
  int who = 0;
  while (int status = moebius_exchange_wait(exchange, number, &who))
    if (status != kAgain) std::abort();
}

// C passes of a layer at once, forward and backward; experts multiply a row by the route's weight.
void pass(Exchange* exchange, std::mt19937_64& common, std::mt19937_64& own) {
  int64_t P = exchange->num_ranks, C = 1 + drawn(common, 3), D = 1 + drawn(common, 40), E = P * (1 + drawn(common, 4));
  bool same = drawn(common, 2) == 0, all_to_one = drawn(common, 8) == 0;
  int64_t large = drawn(common, 50) == 0 ? 3000 : 60;  // now and then a message outgrows its arena
  int64_t U = 1 + drawn(own, large), T = same ? U : 1 + drawn(own, large), N = drawn(own, 3 * large);
  std::vector<int64_t> source(N), target(N), expert(N);
  std::vector<float> weight(N), x(U * D), grad(T * D);
  std::vector<int32_t> rank_E(E), local_E(E);
  for (int64_t e = 0; e < E; e++) rank_E[e] = static_cast<int32_t>(e % P), local_E[e] = static_cast<int32_t>(e / P);
  for (int64_t n = 0; n < N; n++) {
    source[n] = drawn(own, U), target[n] = same ? source[n] : drawn(own, T);
    expert[n] = all_to_one ? 0 : drawn(own, E), weight[n] = static_cast<float>(1 + drawn(own, 7));
  }
  for (float& value : x) value = static_cast<float>(drawn(own, 9) - 4);
  for (float& value : grad) value = static_cast<float>(drawn(own, 9) - 4);
  std::vector<int64_t> buffer(moebius_exchange_plan_words(exchange, U, T, N, same));
  EXPECT(moebius_exchange_plan(exchange, buffer.data(), U, T, N, E, same, source.data(), target.data(),
                               expert.data(), rank_E.data(), local_E.data()) == 0, "%s", exchange->fault)
  int64_t row_bytes = 4 * D;
  std::vector<uint32_t> sent(C), answered(C), grads(C), back(C);
  struct Received {
    std::vector<int64_t> starts, source, slot, target;
    std::vector<float> rows, weight;
  };
  std::vector<Received> received(C);
  for (int64_t c = 0; c < C; c++)
    EXPECT(moebius_exchange_post_out(exchange, buffer.data(), reinterpret_cast<char*>(x.data()), row_bytes,
                                     reinterpret_cast<char*>(weight.data()), 4, &sent[c]) == 0, "post_out")
  for (int64_t c = 0; c < C; c++) {
    Received& in = received[c];
    wait(exchange, sent[c]);
    in.starts.resize(3 * (P + 1));
    EXPECT(moebius_exchange_sizes(exchange, sent[c], row_bytes, 4, in.starts.data()) == 0, "%s", exchange->fault)
    int64_t rows = in.starts[P], routes = in.starts[2 * P + 1], targets = in.starts[3 * P + 2];
    in.rows.resize(rows * D), in.weight.resize(routes);
    in.source.resize(routes), in.slot.resize(routes), in.target.resize(routes);
    EXPECT(moebius_exchange_take_out(exchange, sent[c], row_bytes, 4, reinterpret_cast<char*>(in.rows.data()),
                                     in.source.data(), in.slot.data(), in.target.data(),
                                     reinterpret_cast<char*>(in.weight.data())) == 0, "%s", exchange->fault)
    std::vector<float> answers(targets * D, 0);
    for (int64_t n = 0; n < routes; n++) {
      EXPECT(in.slot[n] >= 0 && in.slot[n] < E / P && in.source[n] < rows && in.target[n] < targets, "a route")
      for (int64_t d = 0; d < D; d++) answers[in.target[n] * D + d] += in.weight[n] * in.rows[in.source[n] * D + d];
    }
    EXPECT(moebius_exchange_post_back(exchange, reinterpret_cast<char*>(answers.data()), row_bytes,
                                      in.starts.data() + 2 * (P + 1), nullptr, nullptr, 0, &answered[c]) == 0, "answers")
  }
  std::vector<float> sums(T * D), expected(T * D, 0);
  for (int64_t n = 0; n < N; n++)
    for (int64_t d = 0; d < D; d++) expected[target[n] * D + d] += weight[n] * x[source[n] * D + d];
  for (int64_t c = 0; c < C; c++) {
    wait(exchange, answered[c]);
    std::fill(sums.begin(), sums.end(), -1);
    EXPECT(moebius_exchange_sum_back(exchange, buffer.data(), answered[c], row_bytes, 0, 0,
                                     reinterpret_cast<char*>(sums.data()), nullptr) == 0, "%s", exchange->fault)
    EXPECT(sums == expected, "rank %d: a sum of answers is wrong", exchange->rank)
  }

  for (int64_t c = 0; c < C; c++)
    EXPECT(moebius_exchange_post_out(exchange, buffer.data(), reinterpret_cast<char*>(grad.data()), row_bytes,
                                     nullptr, 0, &grads[c]) == 0, "post_out of gradients")
  for (int64_t c = C - 1; c >= 0; c--) {  // autograd goes backward
    Received& in = received[c];
    int64_t rows = in.starts[P], routes = in.starts[2 * P + 1], targets = in.starts[3 * P + 2];
    std::vector<float> grad_answers(targets * D), grad_rows(rows * D, 0), grad_weight(routes, 0);
    wait(exchange, grads[c]);
    EXPECT(moebius_exchange_take_out(exchange, grads[c], row_bytes, 0, reinterpret_cast<char*>(grad_answers.data()),
                                     nullptr, nullptr, nullptr, nullptr) == 0, "%s", exchange->fault)
    for (int64_t n = 0; n < routes; n++)
      for (int64_t d = 0; d < D; d++) {
        grad_rows[in.source[n] * D + d] += in.weight[n] * grad_answers[in.target[n] * D + d];
        grad_weight[n] += in.rows[in.source[n] * D + d] * grad_answers[in.target[n] * D + d];
      }
    EXPECT(moebius_exchange_post_back(exchange, reinterpret_cast<char*>(grad_rows.data()), row_bytes, in.starts.data(),
                                      reinterpret_cast<char*>(grad_weight.data()), in.starts.data() + P + 1, 4,
                                      &back[c]) == 0, "gradients of rows")
  }
  std::vector<float> grad_x(U * D), expected_x(U * D, 0), grad_w(N), expected_w(N, 0);
  for (int64_t n = 0; n < N; n++)
    for (int64_t d = 0; d < D; d++) {
      expected_x[source[n] * D + d] += weight[n] * grad[target[n] * D + d];
      expected_w[n] += x[source[n] * D + d] * grad[target[n] * D + d];
    }
  for (int64_t c = 0; c < C; c++) {
    wait(exchange, back[c]);
    std::fill(grad_x.begin(), grad_x.end(), -1), std::fill(grad_w.begin(), grad_w.end(), -1);
    EXPECT(moebius_exchange_sum_back(exchange, buffer.data(), back[c], row_bytes, 4, 0,
                                     reinterpret_cast<char*>(grad_x.data()), reinterpret_cast<char*>(grad_w.data())) == 0,
           "%s", exchange->fault)
    EXPECT(grad_x == expected_x, "rank %d: a gradient of rows is wrong", exchange->rank)
    EXPECT(grad_w == expected_w, "rank %d: a gradient of weights is wrong", exchange->rank)
  }
}

void run(int rank, int num_ranks, int passes, uint64_t seed, Meeting& meeting) {
  std::mt19937_64 common(seed), own(seed * 1000 + rank + 1);
  pauses.seed(seed * 77 + rank);
  Exchange* exchange = moebius_exchange_create(rank + 1, rank, num_ranks);
  if (exchange == nullptr) std::abort();
  meeting.files[rank] = moebius_exchange_file(exchange);
  meeting.exchanges[rank] = exchange;
  meeting.created.wait(num_ranks);
  for (int p = 0; p < num_ranks; p++)
    if (meeting.shared)
      exchange->peers[p].control = meeting.exchanges[p]->own, exchange->peers[p].pid = getpid(),
      exchange->peers[p].neighbour = p == rank ? nullptr : meeting.exchanges[p];
    else if (moebius_exchange_connect(exchange, p, getpid(), meeting.files[p], p + 1) != 0) std::abort();
  meeting.connected.wait(num_ranks);
  for (int i = 0; i < passes && faults.load() == 0; i++) pass(exchange, common, own);
  meeting.done.wait(num_ranks);
  for (Peer& peer : exchange->peers)
    if (meeting.shared && peer.control != exchange->own) peer.control = nullptr;
  moebius_exchange_close(exchange);
}

}  // namespace

void moebius_between_steps() {
  switch (pauses() % 24) {
    case 0: std::this_thread::sleep_for(std::chrono::microseconds(pauses() % 200)); break;
    case 1:
    case 2: std::this_thread::yield(); break;
  }
}

int main(int, char** arguments) {
  int num_ranks = std::atoi(arguments[1]), passes = std::atoi(arguments[2]);
  Meeting meeting;
  meeting.files.resize(num_ranks), meeting.exchanges.resize(num_ranks);
  meeting.shared = std::atoi(arguments[4]) != 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; rank++)
    threads.emplace_back(run, rank, num_ranks, passes, std::strtoull(arguments[3], nullptr, 10), std::ref(meeting));
  for (std::thread& thread : threads) thread.join();
  return faults.load() == 0 ? 0 : 1;
}
