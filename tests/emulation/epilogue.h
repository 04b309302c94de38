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
    ++(store ? current->stores : current->loads);
    return true;
  }
  if (inside) return report("store into an input", address), false;
  return report(store ? "store outside every buffer" : "load outside every buffer", address), false;
}

template <class T>
static T checked_load(const void* address) {
  T value;
  std::memset(&value, 0xA5, sizeof value);
  if (allowed(address, sizeof value, false)) std::memcpy(&value, address, sizeof value);
  return value;
}

Words4 load_words4(const void* address) { return checked_load<Words4>(address); }
long long load_index(const int* address) { return checked_load<int>(address); }
long long load_index(const long long* address) { return checked_load<long long>(address); }
float load_float(const float* address) { return checked_load<float>(address); }

template <class T>
static void checked_store(void* address, const T& value) {
  if (allowed(address, sizeof value, true)) std::memcpy(address, &value, sizeof value);
}

void store_words2(void* address, Words2 words) { checked_store(address, words); }
void store_words4(void* address, Words4 words) { checked_store(address, words); }

void wait_for_predecessors(const unsigned short*&, unsigned char*&) { waited = true; }

void release_dependents() {
  if (!waited) report("release of dependents ahead of the wait", nullptr);
  released = true;
}

static float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#ifdef EMULATED_FP16
float element_to_float(unsigned short bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = bits >> 10 & 31u, fraction = bits & 1023u;
  if (exponent == 31) return from_bits(sign | 0x7F800000u | fraction << 13);
  if (exponent) return from_bits(sign | (exponent + 112u) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}
#else
float element_to_float(unsigned short bits) { return from_bits(static_cast<std::uint32_t>(bits) << 16); }
#endif

// e4m3fn from the bits of an fp32, by integer arithmetic alone.
static unsigned encode_e4m3(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t sign = bits >> 31 << 7, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= 0x43E00000u) return sign | 0x7E;  // 448 and all above
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  if (exponent < -10) return sign;  // below half of the smallest subnormal, 2^-9
  const std::uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
  // In units of the result's last place: 2^(exponent - 3) for normals, 2^-9 for subnormals.
  const int shift = exponent >= -6 ? 20 : 14 - exponent;
  std::uint32_t units = significand >> shift;
  const std::uint32_t rest = significand & ((1u << shift) - 1u), half = 1u << (shift - 1);
  if (rest > half || (rest == half && (units & 1u))) ++units;
  // A carry out of the fraction lands in the exponent, from subnormal to normal as well.
  return sign | (exponent >= -6 ? static_cast<std::uint32_t>(exponent + 6) * 8u + units : units);
}

unsigned float_to_e4m3x4(float a, float b, float c, float d) {
  return encode_e4m3(a) | encode_e4m3(b) << 8 | encode_e4m3(c) << 16 | encode_e4m3(d) << 24;
}

template <unsigned... I>
struct Indices {};
template <unsigned N, unsigned... I>
struct CountTo : CountTo<N - 1, N - 1, I...> {};
template <unsigned... I>
struct CountTo<0, I...> {
  using type = Indices<I...>;
};

template <class... A, unsigned... I>
static void run_grid(void (*kernel)(A...), void** arguments, Indices<I...>) {
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (threadIdx.z = 0; threadIdx.z < blockDim.z; ++threadIdx.z)
          for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
              waited = released = false;
              kernel(*static_cast<A*>(arguments[I])...);
            }
}

template <class... A>
static bool launch_grid(void (*kernel)(A...), Launch* launch) {
  if (launch->argument_count != sizeof...(A)) return false;
  current = launch;
  gridDim = {launch->grid_x, launch->grid_y, launch->grid_z};
  blockDim = {launch->block_x, launch->block_y, launch->block_z};
  run_grid(kernel, launch->arguments, typename CountTo<sizeof...(A)>::type{});
  return true;
}

// 0, or 1 where the number of arguments is not the kernel's.
extern "C" int emulate(Launch* launch) { return launch_grid(mla_prepare, launch) ? 0 : 1; }

extern "C" unsigned emulated_e4m3(float value) { return encode_e4m3(value); }
extern "C" float emulated_element(unsigned short bits) { return element_to_float(bits); }
