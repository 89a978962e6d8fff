// One-sided exchange between the processes of one machine, through memory that all of them map.
//
// Every rank owns an outbox: a control block (what has been posted) and arenas (the messages). A rank
// posts a message by writing it into its own arena and incrementing `posted`; the others read their
// part from there. There are no requests or replies, and no call waits for all ranks. All ranks post in
// the same order, so a message has the same number on all of them. It may be overwritten once every
// rank has read it. If an arena is full, its owner allocates a larger one instead of waiting for
// readers, so there is no deadlock and no limit on a message's size.
//
// Two kinds of messages:
//   out    a block of rows, each stored once, and for every rank the list of rows that it needs (with
//          or without the routes that read them);
//   back   rows by destination: answers, or gradients of rows, which their owner sums in rank order,
//          like a loop on one rank.
//
// The memory is anonymous (memfd) and reached through /proc/<pid>/fd, which the kernel opens only to
// processes of the same user in the same pid namespace. It has no name, so it disappears with the last
// process that maps it, however that ended. It is sealed against shrinking, so no access can fault. A
// rank is alive as long as it holds the lock on its control block, which the kernel releases when the
// process dies.
//
// Memory order: the payload is written before `posted` is incremented (release) and read after the new
// value is seen (acquire). An arena is reused after `unread` is seen at zero (acquire), to which readers
// decrement it after their last read (release). This holds on x86 and on ARM.
//
// Legend: P ranks, U source rows, T target rows, N routes, M distinct (rank, row) pairs.

#include <fcntl.h>
#include <linux/futex.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <deque>
#include <new>
#include <vector>

// For tests: a hook between two steps of the protocol.
#ifdef MOEBIUS_BETWEEN_STEPS
void moebius_between_steps();
#else
static inline void moebius_between_steps() {}
#endif

namespace {

constexpr uint64_t kMagic = 0x316d7973756d6f4d;  // "Mobsym1", the layout's version at its end
constexpr uint32_t kSlots = 1024;                // messages under way, of one rank
constexpr uint32_t kArenas = 40;                 // each at least twice as large as the one before
constexpr int kAgain = 1, kDied = 2, kLeft = 3, kMismatch = 4, kTooMany = 5, kNoMemory = 6, kOutOfRange = 7;
constexpr int kLookNs = 100'000'000;  // between two looks whether a silent peer is alive

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "the flags are shared between processes");

struct Message {
  uint64_t offset, bytes;
  uint32_t arena;
  std::atomic<uint32_t> unread;  // ranks that have not read it
};

struct Arena {
  int32_t fd;
  uint64_t bytes;
};

struct Control {
  uint64_t magic, nonce;
  int32_t rank, num_ranks;
  alignas(64) std::atomic<uint32_t> posted;  // how many messages, modulo 2³²; readers sleep on it
  std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> left;  // 1: in good order
  alignas(64) Arena arenas[kArenas];
  Message messages[kSlots];
};

// The header of every message. The reader checks everything that two ranks must agree about.
struct Header {
  uint32_t number, kind;
  int64_t row_bytes, weight_bytes;
  uint64_t checksum;  // of all that follows; 0: not checked
};

uint64_t checksum_of(const char* bytes, uint64_t count) {  // FNV-1a over words; never 0
  uint64_t sum = 0xcbf29ce484222325, word = 0;
  for (uint64_t i = 0; i < count; i += 8) {
    std::memcpy(&word, bytes + i, 8);
    sum = (sum ^ word) * 0x100000001b3;
  }
  return sum | 1;
}

struct Section {  // of one destination; counts, and where they begin in the message's arrays
  int64_t rows, routes, targets, first_row, first_route;
};

struct Region {
  uint32_t number, arena;
  uint64_t offset, bytes;
};

int memory_file(uint64_t bytes) {
  int fd = static_cast<int>(syscall(SYS_memfd_create, "moebius-exchange", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd < 0) return -1;
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

char* mapped(int fd, uint64_t bytes, int protection) {
  void* found = mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  return found == MAP_FAILED ? nullptr : static_cast<char*>(found);
}

struct flock lock_of(short type) {
  struct flock lock {};
  lock.l_type = type, lock.l_whence = SEEK_SET, lock.l_start = 0, lock.l_len = 1;
  return lock;
}

struct Exchange;

struct Peer {
  Control* control = nullptr;
  Exchange* neighbour = nullptr;  // in tests: one memory at one address, as a sanitizer wants it
  int fd = -1;
  int64_t pid = 0;
  const char* arenas[kArenas] = {};
  uint64_t arena_bytes[kArenas] = {};
};

struct Exchange {
  int rank, num_ranks;
  pid_t pid = getpid();  // a forked child that ends is not this rank that leaves
  Control* own;
  int own_fd;
  char* arenas[kArenas] = {};
  uint32_t num_arenas = 0;
  std::deque<Region> regions;  // not yet read by all, in the order of numbers
  std::vector<Peer> peers;
  std::vector<int32_t> scratch;
  bool checking = false;  // messages get checksums
  char fault[256] = {};

  Message& message(uint32_t number) { return own->messages[number % kSlots]; }

  bool grow(uint64_t bytes) {
    if (num_arenas == kArenas) return false;
    uint64_t before = num_arenas ? own->arenas[num_arenas - 1].bytes : 0;
    uint64_t size = std::max({2 * before, (4 * bytes + 4095) / 4096 * 4096, uint64_t{1} << 20});
    int fd = memory_file(size);
    char* place = fd < 0 ? nullptr : mapped(fd, size, PROT_READ | PROT_WRITE);
    if (place == nullptr) {
      if (fd >= 0) close(fd);
      return false;
    }
    own->arenas[num_arenas] = {fd, size};
    arenas[num_arenas++] = place;
    return true;
  }

  // Frees regions that all ranks have read; an outgrown arena returns its pages when it is empty.
  void release() {
    while (!regions.empty() && message(regions.front().number).unread.load(std::memory_order_acquire) == 0) {
      uint32_t arena = regions.front().arena;
      regions.pop_front();
      bool outgrown = arena + 1 < num_arenas && (regions.empty() || regions.front().arena != arena);
      if (outgrown) fallocate(own->arenas[arena].fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                              static_cast<off_t>(own->arenas[arena].bytes));
    }
  }

  bool place_in_last(uint64_t bytes, uint64_t* offset) {
    if (num_arenas == 0) return false;
    uint32_t last = num_arenas - 1;
    uint64_t size = own->arenas[last].bytes, head = 0, tail = size;
    bool any = false;
    for (const Region& region : regions)
      if (region.arena == last) {
        if (!any) tail = region.offset;
        any = true, head = region.offset + region.bytes;
      }
    if (!any) tail = size, head = 0;
    bool wrapped = any && head <= tail;
    if (!wrapped && head + bytes <= size) return *offset = head, true;
    if (!wrapped && any && bytes < tail) return *offset = 0, true;
    if (wrapped && head + bytes < tail) return *offset = head, true;
    return false;
  }

  // Allocates space for the next message; nullptr if there is no memory.
  char* begin(uint64_t bytes, uint32_t kind, int64_t row_bytes, int64_t weight_bytes, int* status) {
    bytes = (bytes + 63) / 64 * 64;
    release();
    moebius_between_steps();
    uint32_t number = own->posted.load(std::memory_order_relaxed) + 1;
    if (message(number).unread.load(std::memory_order_acquire) != 0) return *status = kTooMany, nullptr;
    uint64_t offset = 0;
    if (!place_in_last(bytes, &offset)) {
      if (!grow(bytes)) return *status = kNoMemory, nullptr;
      offset = 0;
    }
    uint32_t arena = num_arenas - 1;
    regions.push_back({number, arena, offset, bytes});
    Message& entry = message(number);
    entry.offset = offset, entry.bytes = bytes, entry.arena = arena;
    entry.unread.store(static_cast<uint32_t>(num_ranks), std::memory_order_relaxed);
    char* place = arenas[arena] + offset;
    *reinterpret_cast<Header*>(place) = {number, kind, row_bytes, weight_bytes, 0};
    return place;
  }

  uint32_t publish() {
    const Region& region = regions.back();
    char* place = arenas[region.arena] + region.offset;
    if (checking)
      reinterpret_cast<Header*>(place)->checksum =
          checksum_of(place + sizeof(Header), region.bytes - sizeof(Header));
    moebius_between_steps();
    // sequentially consistent on both sides: either the sleeper sees the number, or it is seen
    uint32_t number = own->posted.fetch_add(1, std::memory_order_seq_cst) + 1;
    moebius_between_steps();
    if (own->sleeping.load(std::memory_order_seq_cst) != 0)
      syscall(SYS_futex, &own->posted, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    return number;
  }

  bool is_alive(const Peer& peer) {
    if (peer.pid == getpid()) return true;  // a rank that is a thread; and one's own locks do not show
    struct flock lock = lock_of(F_WRLCK);
    return fcntl(peer.fd, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
  }

  static bool reached(uint32_t posted, uint32_t number) { return static_cast<int32_t>(posted - number) >= 0; }

  // Returns 0, or kAgain after a while without a message, or what has happened to the peer.
  int wait(int who, uint32_t number) {
    Control& control = *peers[who].control;
    for (int i = 0; i < 64; i++)
      if (reached(control.posted.load(std::memory_order_acquire), number)) return 0;
    moebius_between_steps();
    control.sleeping.fetch_add(1, std::memory_order_seq_cst);
    moebius_between_steps();
    uint32_t seen = control.posted.load(std::memory_order_seq_cst);
    if (!reached(seen, number)) {
      moebius_between_steps();
      struct timespec pause {0, kLookNs};
      syscall(SYS_futex, &control.posted, FUTEX_WAIT, seen, &pause, nullptr, 0);
    }
    moebius_between_steps();
    control.sleeping.fetch_sub(1, std::memory_order_seq_cst);
    if (reached(control.posted.load(std::memory_order_acquire), number)) return 0;
    if (control.left.load(std::memory_order_acquire) != 0) return kLeft;
    return is_alive(peers[who]) ? kAgain : kDied;
  }

  const char* arena_of(int who, uint32_t index) {
    Peer& peer = peers[who];
    if (index >= kArenas) return nullptr;
    if (who == rank) return arenas[index];
    if (peer.neighbour != nullptr) return peer.neighbour->arenas[index];
    if (peer.arenas[index] != nullptr) return peer.arenas[index];
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%lld/fd/%d", static_cast<long long>(peer.pid),
                  peer.control->arenas[index].fd);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return nullptr;
    struct stat about {};
    uint64_t bytes = peer.control->arenas[index].bytes;
    bool fits = fstat(fd, &about) == 0 && static_cast<uint64_t>(about.st_size) == bytes;
    char* place = fits ? mapped(fd, bytes, PROT_READ) : nullptr;
    close(fd);  // an arena carries no lock
    peer.arenas[index] = place, peer.arena_bytes[index] = bytes;
    return place;
  }

  // Returns a message that has been waited for; nullptr if it is not the expected one.
  const char* find(int who, uint32_t number, uint32_t kind, int64_t row_bytes, int64_t weight_bytes) {
    const Message& entry = peers[who].control->messages[number % kSlots];
    const char* arena = arena_of(who, entry.arena);
    uint64_t size = arena == nullptr ? 0 : peers[who].control->arenas[entry.arena].bytes;
    if (arena == nullptr || entry.offset > size || entry.bytes > size - entry.offset) {
      std::snprintf(fault, sizeof fault, "message %u of rank %d of the group cannot be mapped", number, who);
      return nullptr;
    }
    const Header& header = *reinterpret_cast<const Header*>(arena + entry.offset);
    if (header.number != number || header.kind != kind || header.row_bytes != row_bytes ||
        header.weight_bytes != weight_bytes) {
      std::snprintf(fault, sizeof fault,
                    "message %u: rank %d of the group posted (no. %u, kind %u, %lld bytes per row, %lld per weight), "
                    "rank %d expects (no. %u, kind %u, %lld, %lld)",
                    number, who, header.number, header.kind, static_cast<long long>(header.row_bytes),
                    static_cast<long long>(header.weight_bytes), rank, number, kind,
                    static_cast<long long>(row_bytes), static_cast<long long>(weight_bytes));
      return nullptr;
    }
    const char* found = arena + entry.offset;
    if (header.checksum != 0 && header.checksum != checksum_of(found + sizeof(Header), entry.bytes - sizeof(Header))) {
      std::snprintf(fault, sizeof fault, "message %u of rank %d of the group is not what was posted: its bits have changed",
                    number, who);
      return nullptr;
    }
    if (!is_within(found, kind, entry.bytes)) {
      std::snprintf(fault, sizeof fault, "message %u of rank %d of the group speaks of more than its %llu bytes", number,
                    who, static_cast<unsigned long long>(entry.bytes));
      return nullptr;
    }
    return found;
  }

  // Returns whether the part for this rank lies within the message.
  bool is_within(const char* message, uint32_t kind, uint64_t bytes) const;

  void have_read(int who, uint32_t number) {
    moebius_between_steps();
    peers[who].control->messages[number % kSlots].unread.fetch_sub(1, std::memory_order_release);
  }
};

constexpr uint32_t kOut = 1, kBack = 2;

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// A message "out": header, a section per rank, then the arrays.
struct OutLayout {
  int64_t sections, list, slot, row, target, weight, block, bytes;
  OutLayout(int P, int64_t listed, int64_t routes, int64_t block_rows, int64_t row_bytes, int64_t weight_bytes) {
    sections = aligned(sizeof(Header) + 4 * sizeof(int64_t));
    list = sections + aligned(P * sizeof(Section));
    slot = list + aligned(4 * listed);
    row = slot + aligned(4 * routes);
    target = row + aligned(4 * routes);
    weight = target + aligned(4 * routes);
    block = weight + aligned(weight_bytes * routes);
    bytes = block + aligned(block_rows * row_bytes);
  }
};

// The sizes that a reader needs to find the arrays; stored after the header.
struct OutSizes {
  int64_t listed, routes, block_rows, unused;
};

struct BackLayout {
  int64_t sections, weight, rows, bytes;
  BackLayout(int P, int64_t routes, int64_t num_rows, int64_t row_bytes, int64_t weight_bytes) {
    sections = aligned(sizeof(Header) + 4 * sizeof(int64_t));
    weight = sections + aligned(P * sizeof(Section));
    rows = weight + aligned(weight_bytes * routes);
    bytes = rows + aligned(num_rows * row_bytes);
  }
};

const OutSizes& sizes_of(const char* message) {
  return *reinterpret_cast<const OutSizes*>(message + sizeof(Header));
}

OutSizes& sizes_of(char* message) { return *reinterpret_cast<OutSizes*>(message + sizeof(Header)); }

const Section* sections_of(const char* message) {
  return reinterpret_cast<const Section*>(message + aligned(sizeof(Header) + 4 * sizeof(int64_t)));
}

Section* sections_of(char* message) {
  return reinterpret_cast<Section*>(message + aligned(sizeof(Header) + 4 * sizeof(int64_t)));
}

bool Exchange::is_within(const char* message, uint32_t kind, uint64_t bytes) const {
  const Header& header = *reinterpret_cast<const Header*>(message);
  const OutSizes& sizes = sizes_of(message);
  auto is_count = [bytes](int64_t count) { return count >= 0 && static_cast<uint64_t>(count) <= bytes; };
  uint64_t least = aligned(sizeof(Header) + 4 * sizeof(int64_t)) + aligned(num_ranks * sizeof(Section));
  if (bytes < least || !is_count(sizes.listed) || !is_count(sizes.routes) || !is_count(sizes.block_rows)) return false;
  const Section& part = sections_of(message)[rank];
  for (int64_t count : {part.rows, part.routes, part.targets, part.first_row, part.first_route})
    if (!is_count(count)) return false;
  if (part.first_row + part.rows > sizes.listed || part.first_route + part.routes > sizes.routes) return false;
  int64_t row = header.row_bytes, weight = header.weight_bytes;
  int64_t end = kind == kOut ? OutLayout(num_ranks, sizes.listed, sizes.routes, sizes.block_rows, row, weight).bytes
                             : BackLayout(num_ranks, sizes.routes, sizes.listed, row, weight).bytes;
  return static_cast<uint64_t>(end) <= bytes;
}

float wide(uint16_t bits) {
  uint32_t widened = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &widened, 4);
  return value;
}

// Rounds to nearest, halves away from zero, like FBGEMM in torch's embedding_bag, which sums the rows
// that `dedup` receives.
uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(0x7fc0);  // stays NaN
  return static_cast<uint16_t>((bits + 0x8000) >> 16);
}

template <typename T>
void add_rows(const std::vector<const char*>& rows, int64_t width, T* out) {
  if (rows.empty()) {
    std::memset(out, 0, width * sizeof(T));
    return;
  }
  std::memcpy(out, rows[0], width * sizeof(T));
  for (size_t i = 1; i < rows.size(); i++) {
    const T* row = reinterpret_cast<const T*>(rows[i]);
    for (int64_t d = 0; d < width; d++) out[d] += row[d];
  }
}

void add_rows_bfloat16(const std::vector<const char*>& rows, int64_t width, uint16_t* out) {
  if (rows.size() < 2) return add_rows(rows, width, out);
  float sums[256];
  for (int64_t begin = 0; begin < width; begin += 256) {
    int64_t length = std::min<int64_t>(256, width - begin);
    for (int64_t d = 0; d < length; d++) sums[d] = wide(reinterpret_cast<const uint16_t*>(rows[0])[begin + d]);
    for (size_t i = 1; i < rows.size(); i++) {
      const uint16_t* row = reinterpret_cast<const uint16_t*>(rows[i]) + begin;
      for (int64_t d = 0; d < length; d++) sums[d] += wide(row[d]);
    }
    for (int64_t d = 0; d < length; d++) out[begin + d] = narrow(sums[d]);
  }
}

// Distinct (rank, row) pairs, sorted by destination rank and by row.
struct Pairs {
  int64_t num_rows;     // U
  int64_t* starts_P1;   // where the pairs of every rank begin
  int32_t* row_M;       // by rank, and within one by row
  int32_t* first_U1;    // where the pairs of every row begin in `pair_M`
  int32_t* pair_M;      // by row, and within one by rank
};

// The destinations of one pass's routes, in a buffer of the caller.
struct Plan {
  int64_t *head, *routes_P1;
  int32_t *order_N, *slot_N, *row_N, *target_N;  // by rank: route, slot, row, target
  Pairs sources, targets;
  int64_t num_words;

  // Computes the parts' sizes in 8-byte words, before any route is read.
  Plan(int64_t* buffer, int64_t P, int64_t U, int64_t T, int64_t N, bool is_same) {
    int64_t M = std::min(N, P * U), back = is_same ? 0 : std::min(N, P * T);
    int64_t* next = buffer;
    auto wide = [&next](int64_t count) { return next += count, next - count; };
    auto narrow = [&wide](int64_t count) { return reinterpret_cast<int32_t*>(wide((count + 1) / 2)); };
    head = wide(5), routes_P1 = wide(P + 1);
    order_N = narrow(N), slot_N = narrow(N), row_N = narrow(N), target_N = narrow(N);
    sources.num_rows = U, sources.starts_P1 = wide(P + 1);
    sources.row_M = narrow(M), sources.first_U1 = narrow(U + 1), sources.pair_M = narrow(M);
    targets = sources;
    if (!is_same) {
      targets.num_rows = T, targets.starts_P1 = wide(P + 1);
      targets.row_M = narrow(back), targets.first_U1 = narrow(T + 1), targets.pair_M = narrow(back);
    }
    num_words = next - buffer;
  }
  static Plan of(int64_t* buffer) {
    return Plan(buffer, buffer[0], buffer[1], buffer[2], buffer[3], buffer[4] != 0);
  }
};

void list_pairs(std::vector<int32_t>& mark, int64_t P, Pairs& pairs) {
  int64_t U = pairs.num_rows, found = 0;
  std::fill(pairs.first_U1, pairs.first_U1 + U + 1, 0);
  for (int64_t p = 0; p < P; p++) {
    pairs.starts_P1[p] = found;
    int32_t* marks = mark.data() + p * U;
    for (int64_t u = 0; u < U; u++) {
      if (marks[u] == 0) continue;
      marks[u] = static_cast<int32_t>(found - pairs.starts_P1[p]);
      pairs.first_U1[u + 1]++;
      pairs.row_M[found++] = static_cast<int32_t>(u);
    }
  }
  pairs.starts_P1[P] = found;
  for (int64_t u = 0; u < U; u++) pairs.first_U1[u + 1] += pairs.first_U1[u];
  std::vector<int32_t> next(pairs.first_U1, pairs.first_U1 + U);
  for (int64_t m = 0; m < found; m++) pairs.pair_M[next[pairs.row_M[m]]++] = static_cast<int32_t>(m);
}

}  // namespace

// Called from Python, where every argument is a pointer or an int64_t (kernels/cpu/build.py).
extern "C" {

// Creates this rank's outbox; nullptr if the system refuses.
Exchange* moebius_exchange_create(int64_t nonce, int64_t rank, int64_t num_ranks) {
  int fd = memory_file(sizeof(Control));
  char* place = fd < 0 ? nullptr : mapped(fd, sizeof(Control), PROT_READ | PROT_WRITE);
  struct flock lock = lock_of(F_WRLCK);
  if (place == nullptr || fcntl(fd, F_SETLK, &lock) != 0) {
    if (fd >= 0) close(fd);
    return nullptr;
  }
  Control* own = new (place) Control();
  own->nonce = nonce, own->rank = rank, own->num_ranks = num_ranks;
  own->magic = kMagic;
  Exchange* exchange = new Exchange();
  exchange->rank = rank, exchange->num_ranks = num_ranks, exchange->own = own, exchange->own_fd = fd;
  exchange->peers.resize(num_ranks);
  exchange->peers[rank].control = own, exchange->peers[rank].pid = getpid();
  return exchange;
}

int64_t moebius_exchange_file(const Exchange* exchange) { return exchange->own_fd; }

// Maps a peer's control block; returns 0, or an errno, or -1 if the memory is not the peer's.
int64_t moebius_exchange_connect(Exchange* exchange, int64_t who, int64_t pid, int64_t fd, int64_t nonce) {
  if (who == exchange->rank) return 0;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%lld/fd/%lld", static_cast<long long>(pid),
                static_cast<long long>(fd));
  int opened = open(path, O_RDWR | O_CLOEXEC);
  if (opened < 0) return errno;
  struct stat about {};
  if (fstat(opened, &about) != 0 || about.st_size != static_cast<off_t>(sizeof(Control))) {
    close(opened);
    return -1;
  }
  Control* control = reinterpret_cast<Control*>(mapped(opened, sizeof(Control), PROT_READ | PROT_WRITE));
  if (control == nullptr || control->magic != kMagic || control->nonce != static_cast<uint64_t>(nonce) ||
      control->rank != who ||
      control->num_ranks != exchange->num_ranks) {
    if (control != nullptr) munmap(control, sizeof(Control));
    close(opened);
    return -1;
  }
  Peer& peer = exchange->peers[who];
  peer.control = control, peer.fd = opened, peer.pid = pid;
  return 0;
}

// Marks this rank as having left (not in a forked child), and unmaps everything.
void moebius_exchange_close(Exchange* exchange) {
  if (exchange->pid == getpid()) {
    exchange->own->left.store(1, std::memory_order_release);
    syscall(SYS_futex, &exchange->own->posted, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  for (int p = 0; p < exchange->num_ranks; p++) {
    Peer& peer = exchange->peers[p];
    for (uint32_t i = 0; i < kArenas; i++)
      if (peer.arenas[i] != nullptr) munmap(const_cast<char*>(peer.arenas[i]), peer.arena_bytes[i]);
    if (p != exchange->rank && peer.control != nullptr) {
      munmap(peer.control, sizeof(Control));
      close(peer.fd);
    }
  }
  for (uint32_t i = 0; i < exchange->num_arenas; i++) {
    munmap(exchange->arenas[i], exchange->own->arenas[i].bytes);
    close(exchange->own->arenas[i].fd);
  }
  munmap(exchange->own, sizeof(Control));
  close(exchange->own_fd);
  delete exchange;
}

// Turns checksums of this rank's future messages, which readers verify, on or off.
void moebius_exchange_check(Exchange* exchange, int64_t checking) { exchange->checking = checking != 0; }

const char* moebius_exchange_fault(const Exchange* exchange) { return exchange->fault; }

int64_t moebius_exchange_bytes(const Exchange* exchange) {
  int64_t bytes = 0;
  for (uint32_t i = 0; i < exchange->num_arenas; i++) bytes += exchange->own->arenas[i].bytes;
  return bytes;
}

// Waits until every rank has posted `number`; writes the rank that has not to `who`.
int64_t moebius_exchange_wait(Exchange* exchange, int64_t number, int* who) {
  for (int i = 0; i < exchange->num_ranks; i++) {
    // starts after this rank, so that not all ranks poll the first one
    *who = (exchange->rank + 1 + i) % exchange->num_ranks;
    if (int status = exchange->wait(*who, static_cast<uint32_t>(number))) return status;
  }
  return 0;
}

// Returns the size of a plan in 8-byte words.
int64_t moebius_exchange_plan_words(const Exchange* exchange, int64_t U, int64_t T, int64_t N, int64_t same) {
  return Plan(nullptr, exchange->num_ranks, U, T, N, same != 0).num_words;
}

// Plans the routes of a pass. `same`: the targets are the source rows, and are listed once.
int64_t moebius_exchange_plan(Exchange* exchange, int64_t* buffer, int64_t U, int64_t T, int64_t N, int64_t E,
                              int64_t same, const int64_t* source_N, const int64_t* target_N,
                              const int64_t* expert_N, const int32_t* rank_E, const int32_t* local_E) {
  int64_t P = exchange->num_ranks;
  Plan plan(buffer, P, U, T, N, same != 0);
  int64_t head[5] = {P, U, T, N, same};
  std::memcpy(plan.head, head, sizeof head);
  for (int64_t n = 0; n < N; n++)
    if (source_N[n] < 0 || source_N[n] >= U || target_N[n] < 0 || target_N[n] >= T || expert_N[n] < 0 ||
        expert_N[n] >= E) {
      std::snprintf(exchange->fault, sizeof exchange->fault,
                    "route %lld reads row %lld of %lld, goes to expert %lld of %lld and to target row %lld of %lld",
                    static_cast<long long>(n), static_cast<long long>(source_N[n]), static_cast<long long>(U),
                    static_cast<long long>(expert_N[n]), static_cast<long long>(E),
                    static_cast<long long>(target_N[n]), static_cast<long long>(T));
      return kOutOfRange;
    }
  std::vector<int32_t> mark(P * U, 0), target_mark(same ? 0 : P * T, 0);
  std::fill(plan.routes_P1, plan.routes_P1 + P + 1, 0);
  for (int64_t n = 0; n < N; n++) {
    int64_t p = rank_E[expert_N[n]];
    mark[p * U + source_N[n]] = 1;
    if (!same) target_mark[p * T + target_N[n]] = 1;
    plan.routes_P1[p + 1]++;
  }
  list_pairs(mark, P, plan.sources);
  if (!same) list_pairs(target_mark, P, plan.targets);
  for (int64_t p = 0; p < P; p++) plan.routes_P1[p + 1] += plan.routes_P1[p];
  std::vector<int64_t> next(plan.routes_P1, plan.routes_P1 + P);
  const std::vector<int32_t>& target_position = same ? mark : target_mark;
  for (int64_t n = 0; n < N; n++) {
    int64_t p = rank_E[expert_N[n]], i = next[p]++;
    plan.order_N[i] = static_cast<int32_t>(n);
    plan.slot_N[i] = local_E[expert_N[n]];
    plan.row_N[i] = mark[p * U + source_N[n]];
    plan.target_N[i] = target_position[p * (same ? U : T) + target_N[n]];
  }
  return 0;
}

// Writes the numbers of rows (0), routes (1) and targets (2) for every rank, (3, P).
void moebius_exchange_sent(const Exchange* exchange, int64_t* buffer, int64_t* counts_3P) {
  Plan plan = Plan::of(buffer);
  int64_t P = exchange->num_ranks;
  const int64_t* starts[3] = {plan.sources.starts_P1, plan.routes_P1, plan.targets.starts_P1};
  for (int i = 0; i < 3; i++)
    for (int64_t p = 0; p < P; p++) counts_3P[i * P + p] = starts[i][p + 1] - starts[i][p];
}

// Posts rows: with weights, the source rows and the routes that read them; without, only the target
// rows (their gradients).
int64_t moebius_exchange_post_out(Exchange* exchange, int64_t* buffer, const char* x, int64_t row_bytes,
                                  const char* weight_N, int64_t weight_bytes, uint32_t* number) {
  Plan plan = Plan::of(buffer);
  int P = exchange->num_ranks;
  bool described = weight_bytes > 0;
  const Pairs& pairs = described ? plan.sources : plan.targets;
  const int64_t *rows_P1 = pairs.starts_P1, *routes_P1 = plan.routes_P1, *targets_P1 = plan.targets.starts_P1;
  const int32_t* row_M = pairs.row_M;
  int64_t U = pairs.num_rows, listed = rows_P1[P], routes = described ? routes_P1[P] : 0;
  std::vector<int32_t>& place_U = exchange->scratch;  // where every row stands in the block
  place_U.assign(U, -1);
  int64_t block_rows = 0;
  for (int64_t m = 0; m < listed; m++) place_U[row_M[m]] = 0;
  for (int64_t u = 0; u < U; u++)
    if (place_U[u] == 0) place_U[u] = static_cast<int32_t>(block_rows++);
  OutLayout layout(P, listed, routes, block_rows, row_bytes, weight_bytes);
  int status = 0;
  char* message = exchange->begin(layout.bytes, kOut, row_bytes, weight_bytes, &status);
  if (message == nullptr) return status;
  sizes_of(message) = {listed, routes, block_rows, 0};
  Section* sections = sections_of(message);
  for (int p = 0; p < P; p++)
    sections[p] = {rows_P1[p + 1] - rows_P1[p],
                   described ? routes_P1[p + 1] - routes_P1[p] : 0,
                   described ? targets_P1[p + 1] - targets_P1[p] : 0,
                   rows_P1[p],
                   described ? routes_P1[p] : 0};
  int32_t* list = reinterpret_cast<int32_t*>(message + layout.list);
  for (int64_t m = 0; m < listed; m++) list[m] = place_U[row_M[m]];
  if (routes > 0) {
    std::memcpy(message + layout.slot, plan.slot_N, 4 * routes);
    std::memcpy(message + layout.row, plan.row_N, 4 * routes);
    std::memcpy(message + layout.target, plan.target_N, 4 * routes);
    for (int64_t i = 0; i < routes; i++)
      std::memcpy(message + layout.weight + i * weight_bytes, weight_N + plan.order_N[i] * weight_bytes, weight_bytes);
  }
  if (block_rows == U) {
    std::memcpy(message + layout.block, x, U * row_bytes);
  } else {
    for (int64_t u = 0; u < U; u++)
      if (place_U[u] >= 0) std::memcpy(message + layout.block + place_U[u] * row_bytes, x + u * row_bytes, row_bytes);
  }
  *number = exchange->publish();
  return 0;
}

// Writes the bounds of every rank's rows, routes and targets, (3, P + 1), of a message that was waited
// for.
int64_t moebius_exchange_sizes(Exchange* exchange, int64_t posted, int64_t row_bytes, int64_t weight_bytes,
                               int64_t* starts_3P1) {
  uint32_t number = static_cast<uint32_t>(posted);
  int64_t P = exchange->num_ranks, *rows = starts_3P1, *routes = rows + P + 1, *targets = routes + P + 1;
  rows[0] = routes[0] = targets[0] = 0;
  for (int p = 0; p < P; p++) {
    const char* message = exchange->find(p, number, kOut, row_bytes, weight_bytes);
    if (message == nullptr) return kMismatch;
    const Section& section = sections_of(message)[exchange->rank];
    rows[p + 1] = rows[p] + section.rows;
    routes[p + 1] = routes[p] + section.routes;
    targets[p + 1] = targets[p] + section.targets;
  }
  return 0;
}

// Copies received rows in rank order, and routes with rows and targets numbered in order of arrival.
int64_t moebius_exchange_take_out(Exchange* exchange, int64_t posted, int64_t row_bytes, int64_t weight_bytes,
                                  char* rows, int64_t* source_N, int64_t* slot_N, int64_t* target_N,
                                  char* weight_N) {
  uint32_t number = static_cast<uint32_t>(posted);
  int64_t first_row = 0, first_route = 0, first_target = 0;
  for (int p = 0; p < exchange->num_ranks; p++) {
    const char* message = exchange->find(p, number, kOut, row_bytes, weight_bytes);
    if (message == nullptr) return kMismatch;
    const OutSizes& sizes = sizes_of(message);
    OutLayout layout(exchange->num_ranks, sizes.listed, sizes.routes, sizes.block_rows, row_bytes, weight_bytes);
    const Section& section = sections_of(message)[exchange->rank];
    const int32_t* list = reinterpret_cast<const int32_t*>(message + layout.list) + section.first_row;
    const char* block = message + layout.block;
    for (int64_t m = 0; m < section.rows; m++) {
      if (list[m] < 0 || list[m] >= sizes.block_rows) {
        std::snprintf(exchange->fault, sizeof exchange->fault, "message %u of rank %d of the group has row %d of %lld",
                      number, p, list[m], static_cast<long long>(sizes.block_rows));
        return kMismatch;
      }
      std::memcpy(rows + (first_row + m) * row_bytes, block + list[m] * row_bytes, row_bytes);
    }
    if (source_N != nullptr && section.routes > 0) {
      const int32_t* slot = reinterpret_cast<const int32_t*>(message + layout.slot) + section.first_route;
      const int32_t* row = reinterpret_cast<const int32_t*>(message + layout.row) + section.first_route;
      const int32_t* target = reinterpret_cast<const int32_t*>(message + layout.target) + section.first_route;
      for (int64_t i = 0; i < section.routes; i++) {
        source_N[first_route + i] = first_row + row[i];
        slot_N[first_route + i] = slot[i];
        target_N[first_route + i] = first_target + target[i];
      }
      std::memcpy(weight_N + first_route * weight_bytes,
                  message + layout.weight + section.first_route * weight_bytes, section.routes * weight_bytes);
    }
    first_row += section.rows, first_route += section.routes, first_target += section.targets;
    exchange->have_read(p, number);
  }
  return 0;
}

// Posts rows by destination, and a weight's gradient per route if `weight_bytes` is positive.
int64_t moebius_exchange_post_back(Exchange* exchange, const char* rows, int64_t row_bytes, const int64_t* rows_P1,
                                   const char* weight_N, const int64_t* routes_P1, int64_t weight_bytes,
                                   uint32_t* number) {
  int P = exchange->num_ranks;
  int64_t routes = weight_bytes > 0 ? routes_P1[P] : 0;
  BackLayout layout(P, routes, rows_P1[P], row_bytes, weight_bytes);
  int status = 0;
  char* message = exchange->begin(layout.bytes, kBack, row_bytes, weight_bytes, &status);
  if (message == nullptr) return status;
  sizes_of(message) = {rows_P1[P], routes, 0, 0};
  Section* sections = sections_of(message);
  for (int p = 0; p < P; p++)
    sections[p] = {rows_P1[p + 1] - rows_P1[p], routes > 0 ? routes_P1[p + 1] - routes_P1[p] : 0, 0, rows_P1[p],
                   routes > 0 ? routes_P1[p] : 0};
  if (routes > 0) std::memcpy(message + layout.weight, weight_N, routes * weight_bytes);
  std::memcpy(message + layout.rows, rows, rows_P1[P] * row_bytes);
  *number = exchange->publish();
  return 0;
}

// Sums the rows of a "back" message that was waited for: row u is the sum over its pairs in rank order,
// zero if it has none. With weights, these are gradients of source rows, and the weights' gradients are
// written in route order; without, they are sums for target rows.
// dtype 0: float32, 1: float64, 2: bfloat16.
int64_t moebius_exchange_sum_back(Exchange* exchange, int64_t* buffer, int64_t posted, int64_t row_bytes,
                                  int64_t weight_bytes, int64_t dtype, char* out, char* weight_N) {
  uint32_t number = static_cast<uint32_t>(posted);
  Plan plan = Plan::of(buffer);
  const Pairs& pairs = weight_bytes > 0 ? plan.sources : plan.targets;
  int P = exchange->num_ranks;
  int64_t U = pairs.num_rows;
  const int64_t *rows_P1 = pairs.starts_P1, *routes_P1 = plan.routes_P1;
  std::vector<const char*> row_of(rows_P1[P]);  // where every pair's row is
  for (int p = 0; p < P; p++) {
    const char* message = exchange->find(p, number, kBack, row_bytes, weight_bytes);
    if (message == nullptr) return kMismatch;
    const OutSizes& sizes = sizes_of(message);
    const Section& section = sections_of(message)[exchange->rank];
    int64_t routes = weight_bytes > 0 ? routes_P1[p + 1] - routes_P1[p] : 0, listed = rows_P1[p + 1] - rows_P1[p];
    if (section.rows != listed || section.routes != routes) {
      std::snprintf(exchange->fault, sizeof exchange->fault,
                    "message %u: rank %d of the group sends %lld rows and %lld weights back, rank %d expects %lld and %lld",
                    number, p, static_cast<long long>(section.rows), static_cast<long long>(section.routes),
                    exchange->rank, static_cast<long long>(listed), static_cast<long long>(routes));
      return kMismatch;
    }
    BackLayout layout(P, sizes.routes, sizes.listed, row_bytes, weight_bytes);
    const char* first = message + layout.rows + section.first_row * row_bytes;
    for (int64_t m = 0; m < listed; m++) row_of[rows_P1[p] + m] = first + m * row_bytes;
    for (int64_t i = 0; i < routes; i++)
      std::memcpy(weight_N + plan.order_N[routes_P1[p] + i] * weight_bytes,
                  message + layout.weight + (section.first_route + i) * weight_bytes, weight_bytes);
  }
  std::vector<const char*> rows;
  int64_t width = row_bytes / (dtype == 0 ? 4 : dtype == 1 ? 8 : 2);
  for (int64_t u = 0; u < U; u++) {
    rows.clear();
    for (int32_t i = pairs.first_U1[u]; i < pairs.first_U1[u + 1]; i++) rows.push_back(row_of[pairs.pair_M[i]]);
    char* to = out + u * row_bytes;
    if (dtype == 0)
      add_rows(rows, width, reinterpret_cast<float*>(to));
    else if (dtype == 1)
      add_rows(rows, width, reinterpret_cast<double*>(to));
    else
      add_rows_bfloat16(rows, width, reinterpret_cast<uint16_t*>(to));
  }
  for (int p = 0; p < P; p++) exchange->have_read(p, number);
  return 0;
}

}  // extern "C"
