// The primitives that prologue.h declares, and a launch that runs a grid's threads one after another.
//
// Every access is checked: inside a region that the test allowed, aligned as the instruction demands, and in
// the order that programmatic dependent launch demands. The first fault is kept as text and the access left
// out, so that a wrong kernel fails its test and not the process.
#pragma once

struct Region {
  std::uintptr_t begin, end;
  int writable;
};

struct Launch {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z;
  int pdl;
  unsigned region_count;
  const Region* regions;
  void** arguments;
  unsigned argument_count;
  char* fault;
  unsigned fault_size;
  unsigned long long loads, stores;
};

static Launch* current;
static bool waited, released;
// Whether a block's threads run to the point where they meet, rather than to their end: nothing is stored.
static bool gathering;

static void report(const char* what, const void* address) {
  if (current->fault[0]) return;
  std::snprintf(current->fault, current->fault_size, "%s at %p by thread (%u, %u, %u) of block (%u, %u, %u)", what,
                address, threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
}

static bool allowed(const void* address, std::size_t size, bool store) {
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(address);
  if (begin % size) return report(store ? "misaligned store" : "misaligned load", address), false;
  if (current->pdl && !waited) return report("memory touched ahead of the wait", address), false;
  if (!store && released) return report("load behind the release of dependents", address), false;
  bool inside = false;
  for (unsigned i = 0; i < current->region_count; ++i) {
    const Region& region = current->regions[i];
    if (begin < region.begin || begin + size > region.end) continue;
    inside = true;
    if (store && !region.writable) continue;
    if (!gathering) ++(store ? current->stores : current->loads);
    return true;
  }
  if (inside) return report("store into an input", address), false;
  return report(store ? "store outside every buffer" : "load outside every buffer", address), false;
}

static void checked_load(const void* address, void* value, std::size_t size) {
  std::memset(value, 0xA5, size);
  if (allowed(address, size, false)) std::memcpy(value, address, size);
}

template <class T>
static T loaded(const T* address) {
  T value;
  checked_load(address, &value, sizeof value);
  return value;
}

void load_words8(const void* address, unsigned* words) { checked_load(address, words, 32); }
void load_words4(const void* address, unsigned* words) { checked_load(address, words, 16); }
void load_words2(const void* address, unsigned* words) { checked_load(address, words, 8); }
void load_words1(const void* address, unsigned* words) { checked_load(address, words, 4); }
unsigned short load_element(const unsigned short* address) { return loaded(address); }
long long load_index(const int* address) { return loaded(address); }
long long load_index(const long long* address) { return loaded(address); }
float load_float(const float* address) { return loaded(address); }

static void checked_store(void* address, const void* value, std::size_t size) {
  if (!gathering && allowed(address, size, true)) std::memcpy(address, value, size);
}

void store_words4(void* address, const unsigned* words) { checked_store(address, words, 16); }
void store_words2(void* address, const unsigned* words) { checked_store(address, words, 8); }
void store_words1(void* address, const unsigned* words) { checked_store(address, words, 4); }
void store_half_word(void* address, unsigned word) {
  const unsigned short half = static_cast<unsigned short>(word);
  checked_store(address, &half, 2);
}

void wait_for_predecessors(const unsigned short*&, unsigned char*&) { waited = true; }

void release_dependents() {
  if (!waited) report("release of dependents ahead of the wait", nullptr);
  released = true;
}

// From the bits of an fp32 with the given exponent, by integer arithmetic alone: its magnitude in a format of
// `fraction` bits whose smallest normal is 2^smallest, to nearest even. A carry out of the fraction lands in the
// exponent, from subnormal to normal as well.
static std::uint32_t round_magnitude(std::uint32_t magnitude, int fraction, int smallest) {
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  const bool normal = exponent >= smallest;
  const int shift = 23 - fraction + (normal ? 0 : smallest - exponent);
  if (shift > 24) return 0;  // below half of the smallest subnormal
  const std::uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
  std::uint32_t units = significand >> shift;
  const std::uint32_t rest = significand & ((1u << shift) - 1u), half = 1u << (shift - 1);
  if (rest > half || (rest == half && (units & 1u))) ++units;
  return normal ? (static_cast<std::uint32_t>(exponent - smallest) << fraction) + units : units;
}

static unsigned encode_e4m3(float value) {
  const std::uint32_t bits = __float_as_uint(value), sign = bits >> 31 << 7, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= 0x43E00000u) return sign | 0x7E;  // 448 and all above
  return sign | round_magnitude(magnitude, 3, -6);
}

#ifdef EMULATED_FP16
float element_to_float(unsigned short bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = bits >> 10 & 31u, fraction = bits & 1023u;
  if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | fraction << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112u) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

static unsigned encode_element(float value) {
  const std::uint32_t bits = __float_as_uint(value), sign = bits >> 31 << 15, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7FFF;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00;  // 65520 and all above
  return sign | round_magnitude(magnitude, 10, -14);
}
#else
float element_to_float(unsigned short bits) { return __uint_as_float(static_cast<std::uint32_t>(bits) << 16); }

static unsigned encode_element(float value) {
  const std::uint32_t bits = __float_as_uint(value), rest = bits & 0xFFFFu;
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  // The exponent ranges are the same, so subnormals and the step to infinity need no care.
  return (bits >> 16) + (rest > 0x8000u || (rest == 0x8000u && (bits >> 16 & 1u)));
}
#endif

unsigned float_to_e4m3x4(float a, float b, float c, float d) {
  return encode_e4m3(a) | encode_e4m3(b) << 8 | encode_e4m3(c) << 16 | encode_e4m3(d) << 24;
}

unsigned float_to_elements(float low, float high) { return encode_element(low) | encode_element(high) << 16; }

#ifdef EMULATED_TILES
// A shuffle has no meaning where threads run one after another. So a block runs twice: first each thread up to
// its tile_max, which keeps the value and leaves the kernel; then again, with every tile's maximum known.
struct Met {};
struct Tile {
  float largest;
  unsigned threads;
};
static Tile tiles[1024];

float tile_max(float value) {
  const unsigned row = threadIdx.y + blockDim.y * threadIdx.z, thread = threadIdx.x + blockDim.x * row;
  if (blockDim.x % kTileThreads || 32 % kTileThreads) report("a tile that straddles two warps", nullptr);
  Tile& tile = tiles[thread / kTileThreads];
  if (gathering) {
    tile.largest = tile.threads++ ? fmaxf(tile.largest, value) : value;
    throw Met();
  }
  if (tile.threads != kTileThreads) report("a tile that not all of its threads reached", nullptr);
  return tile.largest;
}
#endif

template <unsigned... I>
struct Indices {};
template <unsigned N, unsigned... I>
struct CountTo : CountTo<N - 1, N - 1, I...> {};
template <unsigned... I>
struct CountTo<0, I...> {
  using type = Indices<I...>;
};

template <class... A, unsigned... I>
static void run_block(void (*kernel)(A...), void** arguments, Indices<I...>) {
  for (threadIdx.z = 0; threadIdx.z < blockDim.z; ++threadIdx.z)
    for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
      for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
        waited = released = false;
#ifdef EMULATED_TILES
        try {
          kernel(*static_cast<A*>(arguments[I])...);
        } catch (const Met&) {
        }
#else
        kernel(*static_cast<A*>(arguments[I])...);
#endif
      }
}

template <class... A>
static bool launch_grid(void (*kernel)(A...), Launch* launch) {
  if (launch->argument_count != sizeof...(A)) return false;
  const typename CountTo<sizeof...(A)>::type indices{};
  current = launch;
  gridDim = {launch->grid_x, launch->grid_y, launch->grid_z};
  blockDim = {launch->block_x, launch->block_y, launch->block_z};
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
#ifdef EMULATED_TILES
        std::memset(tiles, 0, sizeof tiles);
        gathering = true;
        run_block(kernel, launch->arguments, indices);
        gathering = false;
#endif
        run_block(kernel, launch->arguments, indices);
      }
  return true;
}

// 0, or 1 where the number of arguments is not the kernel's.
extern "C" int emulate(Launch* launch) { return launch_grid(mla_prepare, launch) ? 0 : 1; }

extern "C" unsigned emulated_e4m3(float value) { return encode_e4m3(value); }
extern "C" float emulated_float(unsigned short bits) { return element_to_float(bits); }
extern "C" unsigned emulated_element(float value) { return encode_element(value); }
