"""The templates as Python, written by mlaprep.templates.precompile: do not edit, run it."""

from typing import Any

FINGERPRINT = "77288f51e1914a81a96f451495adbf9ada37207df8fe125c44d720aefeb8481e"
TEMPLATES: dict[str, Any] = {}


def _convert_cuh_j2(environment):
    from jinja2.runtime import LoopContext, Macro, Markup, Namespace, TemplateNotFound, TemplateReference, TemplateRuntimeError, Undefined, escape, identity, internalcode, markup_join, missing, str_join
    name = 'convert.cuh.j2'

    def root(context, missing=missing):
        resolve = context.resolve_or_missing
        undefined = environment.undefined
        concat = environment.concat
        cond_expr_undefined = Undefined
        if 0: yield None
        l_0_spec = resolve('spec')
        l_0_stores_codes = resolve('stores_codes')
        l_0_rounds_elements = resolve('rounds_elements')
        l_0_scaled = resolve('scaled')
        pass
        yield '#ifdef __CUDACC__\n'
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'dtype') == 'bf16'):
            pass
            yield '__device__ __forceinline__ float element_to_float(Element bits) {\n  return __uint_as_float(static_cast<unsigned>(bits) << 16);\n}\n'
        else:
            pass
            yield '__device__ __forceinline__ float element_to_float(Element bits) {\n  float v;\n  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));\n  return v;\n}\n'
        if (undefined(name='stores_codes') if l_0_stores_codes is missing else l_0_stores_codes):
            pass
            yield '\n// Round to nearest even, saturate finite overflow and infinities to +-448, NaN to 0x7f. The first\n// operand of cvt becomes the high byte.\n__device__ __forceinline__ unsigned float_to_e4m3x4(float a, float b, float c, float d) {\n  unsigned packed;\n  asm("{\\n\\t"\n      ".reg .b16 low, high;\\n\\t"\n      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\\n\\t"\n      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\\n\\t"\n      "mov.b32 %0, {low, high};\\n\\t"\n      "}" : "=r"(packed) : "f"(a), "f"(b), "f"(c), "f"(d));\n  return packed;\n}\n'
        if (undefined(name='rounds_elements') if l_0_rounds_elements is missing else l_0_rounds_elements):
            pass
            yield '\n// Round to nearest even; NaN becomes 0x7fff.\n__device__ __forceinline__ unsigned float_to_elements(float low, float high) {\n  unsigned packed;\n  asm("cvt.rn.'
            yield str(('bf16x2' if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'dtype') == 'bf16') else 'f16x2'))
            yield '.f32 %0, %2, %1;" : "=r"(packed) : "f"(low), "f"(high));\n  return packed;\n}\n'
        yield '#endif\n\nstruct Values { float v[kElementsPerThread]; };\n\n__device__ __forceinline__ Values to_values(const Elements& elements) {\n  Values values;\n#pragma unroll\n  for (unsigned i = 0; i < kElementsPerThread / 2; ++i) {\n    values.v[2 * i] = element_to_float(static_cast<Element>(elements.words[i]));\n    values.v[2 * i + 1] = element_to_float(static_cast<Element>(elements.words[i] >> 16));\n  }\n  return values;\n}\n'
        if (undefined(name='stores_codes') if l_0_stores_codes is missing else l_0_stores_codes):
            pass
            yield '\n__device__ __forceinline__ Codes to_codes(const Values& values) {\n  Codes codes;\n'
            if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'elements_per_thread') > 2):
                pass
                yield '#pragma unroll\n  for (unsigned i = 0; i < kElementsPerThread / 4; ++i)\n    codes.words[i] = float_to_e4m3x4(values.v[4 * i], values.v[4 * i + 1], values.v[4 * i + 2], values.v[4 * i + 3]);\n'
            else:
                pass
                yield '  codes.words[0] = float_to_e4m3x4(values.v[0], values.v[1], 0.0f, 0.0f);\n'
            yield '  return codes;\n}\n'
        if (undefined(name='rounds_elements') if l_0_rounds_elements is missing else l_0_rounds_elements):
            pass
            yield '\n__device__ __forceinline__ Elements to_elements(const Values& values) {\n  Elements elements;\n#pragma unroll\n  for (unsigned i = 0; i < kElementsPerThread / 2; ++i)\n    elements.words[i] = float_to_elements(values.v[2 * i], values.v[2 * i + 1]);\n  return elements;\n}\n'
        if (undefined(name='scaled') if l_0_scaled is missing else l_0_scaled):
            pass
            yield '\n__device__ __forceinline__ Values operator*(Values values, float scale) {\n#pragma unroll\n  for (unsigned i = 0; i < kElementsPerThread; ++i) values.v[i] = __fmul_rn(values.v[i], scale);\n  return values;\n}\n'

    blocks = {}
    debug_info = '3=16&14=22&29=25&34=28&51=31&55=34&65=41&75=44'
    return {"__file__": "convert.cuh.j2", "name": name, "root": root, "blocks": blocks, "debug_info": debug_info}


TEMPLATES["convert.cuh.j2"] = _convert_cuh_j2


def _memory_cuh_j2(environment):
    from jinja2.runtime import LoopContext, Macro, Markup, Namespace, TemplateNotFound, TemplateReference, TemplateRuntimeError, Undefined, escape, identity, internalcode, markup_join, missing, str_join
    name = 'memory.cuh.j2'

    def root(context, missing=missing):
        resolve = context.resolve_or_missing
        undefined = environment.undefined
        concat = environment.concat
        cond_expr_undefined = Undefined
        if 0: yield None
        l_0_spec = resolve('spec')
        l_0_stores_codes = resolve('stores_codes')
        l_0_element_store_words = resolve('element_store_words')
        l_0_load_words = missing
        try:
            t_1 = environment.filters['min']
        except KeyError:
            @internalcode
            def t_1(*unused):
                raise TemplateRuntimeError("No filter named 'min' found.")
        pass
        yield '#ifdef __CUDACC__\n// Plain loads: a predecessor may write these addresses during this grid\'s lifetime, where the\n// non-coherent path (ld.global.nc) is undefined. volatile keeps them behind the wait.\n__device__ __forceinline__ void load_words4(const void* address, unsigned* words) {\n  asm volatile("ld.global.v4.u32 { %0, %1, %2, %3 }, [%4];"\n               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(address) : "memory");\n}\n'
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'load_bytes') == 32):
            pass
            yield '\n__device__ __forceinline__ void load_words8(const void* address, unsigned* words) {\n  asm volatile("ld.global.v8.b32 { %0, %1, %2, %3, %4, %5, %6, %7 }, [%8];"\n               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]),\n                 "=r"(words[4]), "=r"(words[5]), "=r"(words[6]), "=r"(words[7]) : "l"(address) : "memory");\n}\n'
        yield '\n__device__ __forceinline__ void load_words2(const void* address, unsigned* words) {\n  asm volatile("ld.global.v2.u32 { %0, %1 }, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(address) : "memory");\n}\n\n__device__ __forceinline__ void load_words1(const void* address, unsigned* words) {\n  asm volatile("ld.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(address) : "memory");\n}\n\n__device__ __forceinline__ Element load_element(const Element* address) {\n  Element v;\n  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(address) : "memory");\n  return v;\n}\n\n__device__ __forceinline__ long long load_index(const int* address) {\n  int v;\n  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");\n  return v;\n}\n\n__device__ __forceinline__ long long load_index(const long long* address) {\n  long long v;\n  asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");\n  return v;\n}\n\n__device__ __forceinline__ float load_float(const float* address) {\n  float v;\n  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");\n  return v;\n}\n\n__device__ __forceinline__ void store_words4(void* address, const unsigned* words) {\n  asm volatile("st.global.v4.u32 [%0], { %1, %2, %3, %4 };"\n               :: "l"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");\n}\n\n__device__ __forceinline__ void store_words2(void* address, const unsigned* words) {\n  asm volatile("st.global.v2.u32 [%0], { %1, %2 };" :: "l"(address), "r"(words[0]), "r"(words[1]) : "memory");\n}\n\n__device__ __forceinline__ void store_words1(void* address, const unsigned* words) {\n  asm volatile("st.global.u32 [%0], %1;" :: "l"(address), "r"(words[0]) : "memory");\n}\n\n__device__ __forceinline__ void store_half_word(void* address, unsigned word) {\n  asm volatile("st.global.u16 [%0], %1;" :: "l"(address), "h"(static_cast<unsigned short>(word)) : "memory");\n}\n'
        if environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'pdl'):
            pass
            yield '\n// Programmatic dependent launch. The release stands behind the wait, never ahead of it: a dependent that\n// reads older data before its own wait relies on our predecessors being complete. It may stand ahead of\n// our stores, since a dependent\'s own wait covers this whole grid; right behind the loads is fastest.\n// Addresses pass through the wait so that they are computed ahead of it, while predecessors still run.\n__device__ __forceinline__ void wait_for_predecessors(const Element*& source, unsigned char*& target) {\n  asm volatile("griddepcontrol.wait;" : "+l"(source), "+l"(target) :: "memory");\n}\n\n__device__ __forceinline__ void release_dependents() {\n  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");\n}\n'
        yield '#endif\n\n// What one thread moves: '
        yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'elements_per_thread'))
        yield ' elements, two in a word, and as many e4m3 codes, four in a word.\nstruct Elements { unsigned words[kElementsPerThread / 2]; };\nstruct Codes { unsigned words['
        yield str(('kElementsPerThread / 4' if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'elements_per_thread') > 2) else '1'))
        yield ']; };\n\n'
        l_0_load_words = t_1(environment, [(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'load_bytes') // 4), (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'elements_per_thread') // 2)])
        context.vars['load_words'] = l_0_load_words
        context.exported_vars.add('load_words')
        yield '__device__ __forceinline__ Elements load_elements(const Element* source) {\n  Elements v;\n#pragma unroll\n  for (unsigned i = 0; i < kElementsPerThread / 2; i += '
        yield str((undefined(name='load_words') if l_0_load_words is missing else l_0_load_words))
        yield ') load_words'
        yield str((undefined(name='load_words') if l_0_load_words is missing else l_0_load_words))
        yield '(source + 2 * i, v.words + i);\n  return v;\n}\n'
        if (undefined(name='stores_codes') if l_0_stores_codes is missing else l_0_stores_codes):
            pass
            yield '\n__device__ __forceinline__ void store_codes(unsigned char* target, const Codes& v) {\n'
            if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'elements_per_thread') > 2):
                pass
                yield '  store_words'
                yield str((environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'elements_per_thread') // 4))
                yield '(target, v.words);\n'
            else:
                pass
                yield '  store_half_word(target, v.words[0]);\n'
            yield '}\n'
        if (undefined(name='element_store_words') if l_0_element_store_words is missing else l_0_element_store_words):
            pass
            yield '\n__device__ __forceinline__ void store_elements(unsigned char* target, const Elements& v) {\n#pragma unroll\n  for (unsigned i = 0; i < kElementsPerThread / 2; i += '
            yield str((undefined(name='element_store_words') if l_0_element_store_words is missing else l_0_element_store_words))
            yield ') store_words'
            yield str((undefined(name='element_store_words') if l_0_element_store_words is missing else l_0_element_store_words))
            yield '(target + 4 * i, v.words + i);\n}\n'

    blocks = {}
    debug_info = '9=22&66=26&82=30&84=32&86=34&90=38&93=42&96=45&97=48&103=54&107=57'
    return {"__file__": "memory.cuh.j2", "name": name, "root": root, "blocks": blocks, "debug_info": debug_info}


TEMPLATES["memory.cuh.j2"] = _memory_cuh_j2


def _mla_prepare_cu_j2(environment):
    from jinja2.runtime import LoopContext, Macro, Markup, Namespace, TemplateNotFound, TemplateReference, TemplateRuntimeError, Undefined, escape, identity, internalcode, markup_join, missing, str_join
    name = 'mla_prepare.cu.j2'

    def root(context, missing=missing):
        resolve = context.resolve_or_missing
        undefined = environment.undefined
        concat = environment.concat
        cond_expr_undefined = Undefined
        if 0: yield None
        l_0_spec = resolve('spec')
        l_0_shown = resolve('shown')
        l_0_fingerprint = resolve('fingerprint')
        l_0_jinja2_version = resolve('jinja2_version')
        l_0_rows_per_token = resolve('rows_per_token')
        l_0_constant_strides = resolve('constant_strides')
        l_0_max_threads = resolve('max_threads')
        l_0_parameters = resolve('parameters')
        l_0_q_factor = resolve('q_factor')
        l_0_kv_factor = resolve('kv_factor')
        l_0_rotates = l_0_both = l_0_padded = l_0_tiled = l_0_q_scaled = l_0_kv_scaled = l_0_scaled = l_0_q_codes = l_0_q_elements = l_0_kv_codes = l_0_kv_elements = l_0_stores_codes = l_0_rounds_elements = l_0_head_offset = l_0_out_head_offset = l_0_q_nope = l_0_q_rope = l_0_k_nope = l_0_k_rope = l_0_q_out = l_0_kv_out = l_0_addresses = l_0_slot_row = l_0_row_offset = l_0_find_row = l_0_put_codes = l_0_put_elements = l_0_put_query = l_0_put_cache = missing
        pass
        l_0_rotates = (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'rope') != 'none')
        context.vars['rotates'] = l_0_rotates
        context.exported_vars.add('rotates')
        l_0_both = (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_q') and environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_kv'))
        context.vars['both'] = l_0_both
        context.exported_vars.add('both')
        l_0_padded = (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'pad_heads_to') > environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'num_heads'))
        context.vars['padded'] = l_0_padded
        context.exported_vars.add('padded')
        l_0_tiled = ((environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'layout') == 'ds_mla') and environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_kv'))
        context.vars['tiled'] = l_0_tiled
        context.exported_vars.add('tiled')
        l_0_q_scaled = (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'q_scale') != 'none')
        context.vars['q_scaled'] = l_0_q_scaled
        context.exported_vars.add('q_scaled')
        l_0_kv_scaled = (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'kv_scale') != 'none')
        context.vars['kv_scaled'] = l_0_kv_scaled
        context.exported_vars.add('kv_scaled')
        l_0_scaled = ((undefined(name='q_scaled') if l_0_q_scaled is missing else l_0_q_scaled) or (undefined(name='kv_scaled') if l_0_kv_scaled is missing else l_0_kv_scaled))
        context.vars['scaled'] = l_0_scaled
        context.exported_vars.add('scaled')
        l_0_q_codes = (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_q') and environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'quantised_query'))
        context.vars['q_codes'] = l_0_q_codes
        context.exported_vars.add('q_codes')
        l_0_q_elements = (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_q') and (not environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'quantised_query')))
        context.vars['q_elements'] = l_0_q_elements
        context.exported_vars.add('q_elements')
        l_0_kv_codes = (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_kv') and (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'layout') in ('fp8', 'fp8-q16')))
        context.vars['kv_codes'] = l_0_kv_codes
        context.exported_vars.add('kv_codes')
        l_0_kv_elements = (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_kv') and (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'layout') == 'same'))
        context.vars['kv_elements'] = l_0_kv_elements
        context.exported_vars.add('kv_elements')
        l_0_stores_codes = (((undefined(name='q_codes') if l_0_q_codes is missing else l_0_q_codes) or (undefined(name='kv_codes') if l_0_kv_codes is missing else l_0_kv_codes)) or (undefined(name='tiled') if l_0_tiled is missing else l_0_tiled))
        context.vars['stores_codes'] = l_0_stores_codes
        context.exported_vars.add('stores_codes')
        l_0_rounds_elements = (((undefined(name='q_elements') if l_0_q_elements is missing else l_0_q_elements) and ((undefined(name='rotates') if l_0_rotates is missing else l_0_rotates) or (undefined(name='q_scaled') if l_0_q_scaled is missing else l_0_q_scaled))) or (((undefined(name='kv_elements') if l_0_kv_elements is missing else l_0_kv_elements) or (undefined(name='tiled') if l_0_tiled is missing else l_0_tiled)) and (undefined(name='rotates') if l_0_rotates is missing else l_0_rotates)))
        context.vars['rounds_elements'] = l_0_rounds_elements
        context.exported_vars.add('rounds_elements')
        yield '// '
        yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'variant_id'))
        yield '\n//\n// MLA prepare: write [k_nope | k_rope] to its cache row and build the query [q_nope | q_rope], one launch.\n// Generated by mlaprep; the spec is\n'
        for l_1_line in (undefined(name='shown') if l_0_shown is missing else l_0_shown):
            _loop_vars = {}
            pass
            yield '//   '
            yield str(l_1_line)
            yield '\n'
        l_1_line = missing
        yield '// templates '
        yield str((undefined(name='fingerprint') if l_0_fingerprint is missing else l_0_fingerprint))
        yield '\n// jinja2 '
        yield str((undefined(name='jinja2_version') if l_0_jinja2_version is missing else l_0_jinja2_version))
        yield '\n\nusing Element = unsigned short;  // bits of one '
        yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'dtype'))
        yield '\n\n'
        if ((undefined(name='padded') if l_0_padded is missing else l_0_padded) or (undefined(name='both') if l_0_both is missing else l_0_both)):
            pass
            yield 'constexpr unsigned kNumHeads = '
            yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'num_heads'))
            yield ';\n'
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'rope_dim') or (undefined(name='tiled') if l_0_tiled is missing else l_0_tiled)):
            pass
            yield 'constexpr unsigned kLoraRank = '
            yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'kv_lora_rank'))
            yield ';\n'
        yield 'constexpr unsigned kElementsPerThread = '
        yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'elements_per_thread'))
        yield ';\nconstexpr unsigned kRowsPerToken = '
        yield str((undefined(name='rows_per_token') if l_0_rows_per_token is missing else l_0_rows_per_token))
        yield ';\n'
        if ((undefined(name='padded') if l_0_padded is missing else l_0_padded) and (undefined(name='both') if l_0_both is missing else l_0_both)):
            pass
            yield 'constexpr unsigned kPaddedHeads = '
            yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'pad_heads_to'))
            yield ';\n'
        if (undefined(name='tiled') if l_0_tiled is missing else l_0_tiled):
            pass
            yield 'constexpr unsigned kRowWidth = '
            yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'row_width'))
            yield ';\n'
        if (undefined(name='rotates') if l_0_rotates is missing else l_0_rotates):
            pass
            yield 'constexpr unsigned kRopeDim = '
            yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'rope_dim'))
            yield ';\n'
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'dcp_world') > 1):
            pass
            yield 'constexpr unsigned long long kDcpWorld = '
            yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'dcp_world'))
            yield ';\nconstexpr unsigned long long kDcpInterleave = '
            yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'dcp_interleave'))
            yield ';\n'
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'page_size') > 1):
            pass
            yield 'constexpr long long kPageSize = '
            yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'page_size'))
            yield ';\n'
        for (l_1_name, l_1_stride) in context.call(environment.getattr((undefined(name='constant_strides') if l_0_constant_strides is missing else l_0_constant_strides), 'items')):
            _loop_vars = {}
            pass
            yield 'constexpr long long '
            yield str(l_1_name)
            yield ' = '
            yield str(l_1_stride)
            yield ';\n'
        l_1_name = l_1_stride = missing
        yield '\n'
        template = environment.get_template('memory.cuh.j2', 'mla_prepare.cu.j2')
        gen = template.root_render_func(template.new_context(context.get_all(), True, {'addresses': l_0_addresses, 'both': l_0_both, 'find_row': l_0_find_row, 'head_offset': l_0_head_offset, 'k_nope': l_0_k_nope, 'k_rope': l_0_k_rope, 'kv_codes': l_0_kv_codes, 'kv_elements': l_0_kv_elements, 'kv_factor': l_0_kv_factor, 'kv_out': l_0_kv_out, 'kv_scaled': l_0_kv_scaled, 'out_head_offset': l_0_out_head_offset, 'padded': l_0_padded, 'put_cache': l_0_put_cache, 'put_codes': l_0_put_codes, 'put_elements': l_0_put_elements, 'put_query': l_0_put_query, 'q_codes': l_0_q_codes, 'q_elements': l_0_q_elements, 'q_factor': l_0_q_factor, 'q_nope': l_0_q_nope, 'q_out': l_0_q_out, 'q_rope': l_0_q_rope, 'q_scaled': l_0_q_scaled, 'rotates': l_0_rotates, 'rounds_elements': l_0_rounds_elements, 'row_offset': l_0_row_offset, 'scaled': l_0_scaled, 'slot_row': l_0_slot_row, 'stores_codes': l_0_stores_codes, 'tiled': l_0_tiled}))
        try:
            for event in gen:
                yield event
        finally: gen.close()
        yield '\n'
        template = environment.get_template('convert.cuh.j2', 'mla_prepare.cu.j2')
        gen = template.root_render_func(template.new_context(context.get_all(), True, {'addresses': l_0_addresses, 'both': l_0_both, 'find_row': l_0_find_row, 'head_offset': l_0_head_offset, 'k_nope': l_0_k_nope, 'k_rope': l_0_k_rope, 'kv_codes': l_0_kv_codes, 'kv_elements': l_0_kv_elements, 'kv_factor': l_0_kv_factor, 'kv_out': l_0_kv_out, 'kv_scaled': l_0_kv_scaled, 'out_head_offset': l_0_out_head_offset, 'padded': l_0_padded, 'put_cache': l_0_put_cache, 'put_codes': l_0_put_codes, 'put_elements': l_0_put_elements, 'put_query': l_0_put_query, 'q_codes': l_0_q_codes, 'q_elements': l_0_q_elements, 'q_factor': l_0_q_factor, 'q_nope': l_0_q_nope, 'q_out': l_0_q_out, 'q_rope': l_0_q_rope, 'q_scaled': l_0_q_scaled, 'rotates': l_0_rotates, 'rounds_elements': l_0_rounds_elements, 'row_offset': l_0_row_offset, 'scaled': l_0_scaled, 'slot_row': l_0_slot_row, 'stores_codes': l_0_stores_codes, 'tiled': l_0_tiled}))
        try:
            for event in gen:
                yield event
        finally: gen.close()
        if (undefined(name='rotates') if l_0_rotates is missing else l_0_rotates):
            pass
            yield '\n'
            template = environment.get_template('rope.cuh.j2', 'mla_prepare.cu.j2')
            gen = template.root_render_func(template.new_context(context.get_all(), True, {'addresses': l_0_addresses, 'both': l_0_both, 'find_row': l_0_find_row, 'head_offset': l_0_head_offset, 'k_nope': l_0_k_nope, 'k_rope': l_0_k_rope, 'kv_codes': l_0_kv_codes, 'kv_elements': l_0_kv_elements, 'kv_factor': l_0_kv_factor, 'kv_out': l_0_kv_out, 'kv_scaled': l_0_kv_scaled, 'out_head_offset': l_0_out_head_offset, 'padded': l_0_padded, 'put_cache': l_0_put_cache, 'put_codes': l_0_put_codes, 'put_elements': l_0_put_elements, 'put_query': l_0_put_query, 'q_codes': l_0_q_codes, 'q_elements': l_0_q_elements, 'q_factor': l_0_q_factor, 'q_nope': l_0_q_nope, 'q_out': l_0_q_out, 'q_rope': l_0_q_rope, 'q_scaled': l_0_q_scaled, 'rotates': l_0_rotates, 'rounds_elements': l_0_rounds_elements, 'row_offset': l_0_row_offset, 'scaled': l_0_scaled, 'slot_row': l_0_slot_row, 'stores_codes': l_0_stores_codes, 'tiled': l_0_tiled}))
            try:
                for event in gen:
                    yield event
            finally: gen.close()
        if (undefined(name='tiled') if l_0_tiled is missing else l_0_tiled):
            pass
            yield '\n'
            template = environment.get_template('tile.cuh.j2', 'mla_prepare.cu.j2')
            gen = template.root_render_func(template.new_context(context.get_all(), True, {'addresses': l_0_addresses, 'both': l_0_both, 'find_row': l_0_find_row, 'head_offset': l_0_head_offset, 'k_nope': l_0_k_nope, 'k_rope': l_0_k_rope, 'kv_codes': l_0_kv_codes, 'kv_elements': l_0_kv_elements, 'kv_factor': l_0_kv_factor, 'kv_out': l_0_kv_out, 'kv_scaled': l_0_kv_scaled, 'out_head_offset': l_0_out_head_offset, 'padded': l_0_padded, 'put_cache': l_0_put_cache, 'put_codes': l_0_put_codes, 'put_elements': l_0_put_elements, 'put_query': l_0_put_query, 'q_codes': l_0_q_codes, 'q_elements': l_0_q_elements, 'q_factor': l_0_q_factor, 'q_nope': l_0_q_nope, 'q_out': l_0_q_out, 'q_rope': l_0_q_rope, 'q_scaled': l_0_q_scaled, 'rotates': l_0_rotates, 'rounds_elements': l_0_rounds_elements, 'row_offset': l_0_row_offset, 'scaled': l_0_scaled, 'slot_row': l_0_slot_row, 'stores_codes': l_0_stores_codes, 'tiled': l_0_tiled}))
            try:
                for event in gen:
                    yield event
            finally: gen.close()
        if environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_kv'):
            pass
            yield '\n'
            template = environment.get_template('scatter.cuh.j2', 'mla_prepare.cu.j2')
            gen = template.root_render_func(template.new_context(context.get_all(), True, {'addresses': l_0_addresses, 'both': l_0_both, 'find_row': l_0_find_row, 'head_offset': l_0_head_offset, 'k_nope': l_0_k_nope, 'k_rope': l_0_k_rope, 'kv_codes': l_0_kv_codes, 'kv_elements': l_0_kv_elements, 'kv_factor': l_0_kv_factor, 'kv_out': l_0_kv_out, 'kv_scaled': l_0_kv_scaled, 'out_head_offset': l_0_out_head_offset, 'padded': l_0_padded, 'put_cache': l_0_put_cache, 'put_codes': l_0_put_codes, 'put_elements': l_0_put_elements, 'put_query': l_0_put_query, 'q_codes': l_0_q_codes, 'q_elements': l_0_q_elements, 'q_factor': l_0_q_factor, 'q_nope': l_0_q_nope, 'q_out': l_0_q_out, 'q_rope': l_0_q_rope, 'q_scaled': l_0_q_scaled, 'rotates': l_0_rotates, 'rounds_elements': l_0_rounds_elements, 'row_offset': l_0_row_offset, 'scaled': l_0_scaled, 'slot_row': l_0_slot_row, 'stores_codes': l_0_stores_codes, 'tiled': l_0_tiled}))
            try:
                for event in gen:
                    yield event
            finally: gen.close()
        def macro(l_1_stride):
            t_1 = []
            if l_1_stride is missing:
                l_1_stride = undefined("parameter 'stride' was not provided", name='stride')
            pass
            if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'num_heads') > 1):
                pass
                t_1.extend((
                    ' + head * ',
                    str(l_1_stride),
                ))
            return concat(t_1)
        context.exported_vars.add('head_offset')
        context.vars['head_offset'] = l_0_head_offset = Macro(environment, macro, 'head_offset', ('stride',), False, False, False, context.eval_ctx.autoescape)
        def macro():
            t_2 = []
            pass
            if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'pad_heads_to') > 1):
                pass
                t_2.append(
                    ' + head * out_head_stride',
                )
            return concat(t_2)
        context.exported_vars.add('out_head_offset')
        context.vars['out_head_offset'] = l_0_out_head_offset = Macro(environment, macro, 'out_head_offset', (), False, False, False, context.eval_ctx.autoescape)
        yield '\n// A block is (threads a row) x (rows) x (tokens); a thread moves '
        yield str(environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'elements_per_thread'))
        yield ' elements of one row. The rows of a\n// token are '
        yield str(('its query heads' if environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_q') else cond_expr_undefined("the inline if-expression on line 73 in 'mla_prepare.cu.j2' evaluated to false and no else section was defined.")))
        yield str((', then ' if (undefined(name='both') if l_0_both is missing else l_0_both) else cond_expr_undefined("the inline if-expression on line 73 in 'mla_prepare.cu.j2' evaluated to false and no else section was defined.")))
        yield str(('its cache row' if environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_kv') else cond_expr_undefined("the inline if-expression on line 73 in 'mla_prepare.cu.j2' evaluated to false and no else section was defined.")))
        yield ': x of the grid runs over them, y and z over the tokens.\nextern "C" __global__ void __launch_bounds__('
        yield str((undefined(name='max_threads') if l_0_max_threads is missing else l_0_max_threads))
        yield ') mla_prepare(\n'
        l_1_loop = missing
        for (l_1_type, l_1_name), l_1_loop in LoopContext((undefined(name='parameters') if l_0_parameters is missing else l_0_parameters), undefined):
            _loop_vars = {}
            pass
            yield '    '
            yield str(l_1_type)
            yield ' '
            yield str(l_1_name)
            yield str((',' if (not environment.getattr(l_1_loop, 'last')) else cond_expr_undefined("the inline if-expression on line 76 in 'mla_prepare.cu.j2' evaluated to false and no else section was defined.")))
            yield '\n'
        l_1_loop = l_1_type = l_1_name = missing
        yield ') {\n  const unsigned column = threadIdx.x * kElementsPerThread;\n  const unsigned head = blockIdx.x * blockDim.y + threadIdx.y;\n  const long long token = (blockIdx.z * gridDim.y + blockIdx.y) * blockDim.z + threadIdx.z;\n'
        if (undefined(name='both') if l_0_both is missing else l_0_both):
            pass
            yield '  const bool is_query = head < '
            yield str(('kPaddedHeads' if (undefined(name='padded') if l_0_padded is missing else l_0_padded) else 'kNumHeads'))
            yield ';\n'
        yield '\n'
        l_0_q_nope = str_join(('q_nope + token * q_nope_token_stride', context.call((undefined(name='head_offset') if l_0_head_offset is missing else l_0_head_offset), 'q_nope_head_stride'), ' + column', ))
        context.vars['q_nope'] = l_0_q_nope
        context.exported_vars.add('q_nope')
        l_0_q_rope = str_join(('q_rope + token * q_rope_token_stride', context.call((undefined(name='head_offset') if l_0_head_offset is missing else l_0_head_offset), 'q_rope_head_stride'), ' + (column - kLoraRank)', ))
        context.vars['q_rope'] = l_0_q_rope
        context.exported_vars.add('q_rope')
        l_0_k_nope = 'k_nope + token * k_nope_token_stride + column'
        context.vars['k_nope'] = l_0_k_nope
        context.exported_vars.add('k_nope')
        l_0_k_rope = 'k_rope + token * k_rope_token_stride + (column - kLoraRank)'
        context.vars['k_rope'] = l_0_k_rope
        context.exported_vars.add('k_rope')
        l_0_q_out = str_join(('token * out_token_stride', context.call((undefined(name='out_head_offset') if l_0_out_head_offset is missing else l_0_out_head_offset)), ' + column', ))
        context.vars['q_out'] = l_0_q_out
        context.exported_vars.add('q_out')
        l_0_q_out = str_join(('q_out + ', ((undefined(name='q_out') if l_0_q_out is missing else l_0_q_out) if (undefined(name='q_codes') if l_0_q_codes is missing else l_0_q_codes) else str_join(('2 * (', (undefined(name='q_out') if l_0_q_out is missing else l_0_q_out), ')', ))), ))
        context.vars['q_out'] = l_0_q_out
        context.exported_vars.add('q_out')
        l_0_kv_out = str_join(('kv_cache + ', ('2 * column' if (undefined(name='kv_elements') if l_0_kv_elements is missing else l_0_kv_elements) else 'column'), ))
        context.vars['kv_out'] = l_0_kv_out
        context.exported_vars.add('kv_out')
        def macro(l_1_nope, l_1_rope, l_1_target, l_1_indent):
            t_3 = []
            if l_1_nope is missing:
                l_1_nope = undefined("parameter 'nope' was not provided", name='nope')
            if l_1_rope is missing:
                l_1_rope = undefined("parameter 'rope' was not provided", name='rope')
            if l_1_target is missing:
                l_1_target = undefined("parameter 'target' was not provided", name='target')
            if l_1_indent is missing:
                l_1_indent = undefined("parameter 'indent' was not provided", name='indent')
            pass
            if environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'rope_dim'):
                pass
                t_3.extend((
                    str(l_1_indent),
                    'source = column < kLoraRank ? ',
                    str(l_1_nope),
                    '\n',
                    str(l_1_indent),
                    '                            : ',
                    str(l_1_rope),
                    ';\n',
                ))
            else:
                pass
                t_3.extend((
                    str(l_1_indent),
                    'source = ',
                    str(l_1_nope),
                    ';\n',
                ))
            t_3.extend((
                str(l_1_indent),
                'target = ',
                str(l_1_target),
                ';',
            ))
            return concat(t_3)
        context.exported_vars.add('addresses')
        context.vars['addresses'] = l_0_addresses = Macro(environment, macro, 'addresses', ('nope', 'rope', 'target', 'indent'), False, False, False, context.eval_ctx.autoescape)
        yield '  // One address and one load whatever the source: warps that straddle two sources do not load twice.\n  const Element* source;\n  unsigned char* target;\n'
        if (undefined(name='both') if l_0_both is missing else l_0_both):
            pass
            yield '  if (is_query) {\n'
            yield str(context.call((undefined(name='addresses') if l_0_addresses is missing else l_0_addresses), (undefined(name='q_nope') if l_0_q_nope is missing else l_0_q_nope), (undefined(name='q_rope') if l_0_q_rope is missing else l_0_q_rope), (undefined(name='q_out') if l_0_q_out is missing else l_0_q_out), '    '))
            yield '\n  } else {\n'
            yield str(context.call((undefined(name='addresses') if l_0_addresses is missing else l_0_addresses), (undefined(name='k_nope') if l_0_k_nope is missing else l_0_k_nope), (undefined(name='k_rope') if l_0_k_rope is missing else l_0_k_rope), (undefined(name='kv_out') if l_0_kv_out is missing else l_0_kv_out), '    '))
            yield '\n  }\n'
        elif environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_q'):
            pass
            yield str(context.call((undefined(name='addresses') if l_0_addresses is missing else l_0_addresses), (undefined(name='q_nope') if l_0_q_nope is missing else l_0_q_nope), (undefined(name='q_rope') if l_0_q_rope is missing else l_0_q_rope), (undefined(name='q_out') if l_0_q_out is missing else l_0_q_out), '  '))
            yield '\n'
        else:
            pass
            yield str(context.call((undefined(name='addresses') if l_0_addresses is missing else l_0_addresses), (undefined(name='k_nope') if l_0_k_nope is missing else l_0_k_nope), (undefined(name='k_rope') if l_0_k_rope is missing else l_0_k_rope), (undefined(name='kv_out') if l_0_kv_out is missing else l_0_kv_out), '  '))
            yield '\n'
        if environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'pdl'):
            pass
            yield '  wait_for_predecessors(source, target);\n'
        yield '  if (head >= kRowsPerToken || token >= tokens'
        yield str((' || column >= kRowWidth' if (undefined(name='tiled') if l_0_tiled is missing else l_0_tiled) else cond_expr_undefined("the inline if-expression on line 119 in 'mla_prepare.cu.j2' evaluated to false and no else section was defined.")))
        yield ') return;\n'
        if (undefined(name='padded') if l_0_padded is missing else l_0_padded):
            pass
            yield '  if (head >= kNumHeads'
            yield str((' && is_query' if (undefined(name='both') if l_0_both is missing else l_0_both) else cond_expr_undefined("the inline if-expression on line 121 in 'mla_prepare.cu.j2' evaluated to false and no else section was defined.")))
            yield ') {\n    store_'
            yield str(('codes' if (undefined(name='q_codes') if l_0_q_codes is missing else l_0_q_codes) else 'elements'))
            yield '(target, {});\n    return;\n  }\n'
        yield '\n  const Elements elements = load_elements(source);\n'
        if (undefined(name='rotates') if l_0_rotates is missing else l_0_rotates):
            pass
            yield '  const bool rotates = column >= kLoraRank;\n  Rotation rotation;\n  if (rotates) {\n    // A position outside the table reads its nearest row, never beside it.\n    long long position = load_index(positions + token);\n    position = position < 0 ? 0 : position < cos_sin_rows ? position : cos_sin_rows - 1;\n    rotation = load_rotation(cos_sin_cache + position * kRopeDim, source, column - kLoraRank);\n  }\n'
        if (undefined(name='scaled') if l_0_scaled is missing else l_0_scaled):
            pass
            l_0_q_factor = (str_join(('load_float(q_scale_inv', (' + token' if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'q_scale') == 'token') else ''), ')', )) if (undefined(name='q_scaled') if l_0_q_scaled is missing else l_0_q_scaled) else '1.0f')
            context.vars['q_factor'] = l_0_q_factor
            context.exported_vars.add('q_factor')
            l_0_kv_factor = ('load_float(kv_scale_inv)' if (undefined(name='kv_scaled') if l_0_kv_scaled is missing else l_0_kv_scaled) else '1.0f')
            context.vars['kv_factor'] = l_0_kv_factor
            context.exported_vars.add('kv_factor')
            yield '  const float scale = '
            yield str((str_join(('is_query ? ', (undefined(name='q_factor') if l_0_q_factor is missing else l_0_q_factor), ' : ', (undefined(name='kv_factor') if l_0_kv_factor is missing else l_0_kv_factor), )) if (undefined(name='both') if l_0_both is missing else l_0_both) else ((undefined(name='q_factor') if l_0_q_factor is missing else l_0_q_factor) if environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_q') else (undefined(name='kv_factor') if l_0_kv_factor is missing else l_0_kv_factor))))
            yield ';\n'
        if (undefined(name='both') if l_0_both is missing else l_0_both):
            pass
            yield '  long long slot = 0;\n  if (!is_query) slot = load_index(loc + token);\n'
        elif environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_kv'):
            pass
            yield '  const long long slot = load_index(loc + token);\n'
        if environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'pdl'):
            pass
            yield '  release_dependents();\n'
        yield '\n'
        l_0_slot_row = str_join(('cache_row(slot, cache_rows', (', reserved_slot' if environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'reserved_slot') else ''), (', dcp_rank' if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'dcp_world') > 1) else ''), ')', ))
        context.vars['slot_row'] = l_0_slot_row
        context.exported_vars.add('slot_row')
        l_0_row_offset = ('row / kPageSize * cache_page_stride + row % kPageSize * cache_row_stride' if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'page_size') > 1) else 'row * cache_row_stride')
        context.vars['row_offset'] = l_0_row_offset
        context.exported_vars.add('row_offset')
        def macro(l_1_indent):
            t_4 = []
            if l_1_indent is missing:
                l_1_indent = undefined("parameter 'indent' was not provided", name='indent')
            pass
            t_4.extend((
                str(l_1_indent),
                'const long long row = ',
                str((undefined(name='slot_row') if l_0_slot_row is missing else l_0_slot_row)),
                ';\n',
                str(l_1_indent),
                'if (row < 0) return;\n',
                str(l_1_indent),
                'target += ',
                str((str_join(('2 * (', (undefined(name='row_offset') if l_0_row_offset is missing else l_0_row_offset), ')', )) if (undefined(name='kv_elements') if l_0_kv_elements is missing else l_0_kv_elements) else (undefined(name='row_offset') if l_0_row_offset is missing else l_0_row_offset))),
                ';',
            ))
            return concat(t_4)
        context.exported_vars.add('find_row')
        context.vars['find_row'] = l_0_find_row = Macro(environment, macro, 'find_row', ('indent',), False, False, False, context.eval_ctx.autoescape)
        if (undefined(name='both') if l_0_both is missing else l_0_both):
            pass
            yield '  if (!is_query) {\n'
            yield str(context.call((undefined(name='find_row') if l_0_find_row is missing else l_0_find_row), '    '))
            yield '\n  }\n'
        elif environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_kv'):
            pass
            yield str(context.call((undefined(name='find_row') if l_0_find_row is missing else l_0_find_row), '  '))
            yield '\n'
        if ((undefined(name='stores_codes') if l_0_stores_codes is missing else l_0_stores_codes) or (undefined(name='rounds_elements') if l_0_rounds_elements is missing else l_0_rounds_elements)):
            pass
            yield '  '
            yield str(('' if (undefined(name='rotates') if l_0_rotates is missing else l_0_rotates) else 'const '))
            yield 'Values values = to_values(elements);\n'
            if (undefined(name='rotates') if l_0_rotates is missing else l_0_rotates):
                pass
                yield '  if (rotates) values = rotate(values, rotation);\n'
        def macro(l_1_is_scaled):
            t_5 = []
            if l_1_is_scaled is missing:
                l_1_is_scaled = undefined("parameter 'is_scaled' was not provided", name='is_scaled')
            pass
            t_5.extend((
                'store_codes(target, to_codes(values',
                str((' * scale' if l_1_is_scaled else cond_expr_undefined("the inline if-expression on line 173 in 'mla_prepare.cu.j2' evaluated to false and no else section was defined."))),
                '));',
            ))
            return concat(t_5)
        context.exported_vars.add('put_codes')
        context.vars['put_codes'] = l_0_put_codes = Macro(environment, macro, 'put_codes', ('is_scaled',), False, False, False, context.eval_ctx.autoescape)
        def macro(l_1_is_scaled):
            t_6 = []
            if l_1_is_scaled is missing:
                l_1_is_scaled = undefined("parameter 'is_scaled' was not provided", name='is_scaled')
            pass
            t_6.append(
                'store_elements(target, ',
            )
            if l_1_is_scaled:
                pass
                t_6.append(
                    'to_elements(values * scale)',
                )
            elif (undefined(name='rotates') if l_0_rotates is missing else l_0_rotates):
                pass
                t_6.append(
                    'rotates ? to_elements(values) : elements',
                )
            else:
                pass
                t_6.append(
                    'elements',
                )
            t_6.append(
                ');',
            )
            return concat(t_6)
        context.exported_vars.add('put_elements')
        context.vars['put_elements'] = l_0_put_elements = Macro(environment, macro, 'put_elements', ('is_scaled',), False, False, False, context.eval_ctx.autoescape)
        def macro():
            t_7 = []
            pass
            t_7.append(
                str((context.call((undefined(name='put_codes') if l_0_put_codes is missing else l_0_put_codes), (undefined(name='q_scaled') if l_0_q_scaled is missing else l_0_q_scaled)) if (undefined(name='q_codes') if l_0_q_codes is missing else l_0_q_codes) else context.call((undefined(name='put_elements') if l_0_put_elements is missing else l_0_put_elements), (undefined(name='q_scaled') if l_0_q_scaled is missing else l_0_q_scaled)))),
            )
            return concat(t_7)
        context.exported_vars.add('put_query')
        context.vars['put_query'] = l_0_put_query = Macro(environment, macro, 'put_query', (), False, False, False, context.eval_ctx.autoescape)
        def macro(l_1_indent):
            t_8 = []
            if l_1_indent is missing:
                l_1_indent = undefined("parameter 'indent' was not provided", name='indent')
            pass
            if (undefined(name='tiled') if l_0_tiled is missing else l_0_tiled):
                pass
                t_8.extend((
                    str(l_1_indent),
                    'if (column < kLoraRank) {\n',
                    str(l_1_indent),
                    '  const float scale_of_tile = tile_scale(values);\n',
                    str(l_1_indent),
                    '  store_codes(target, to_codes(values / scale_of_tile));\n',
                    str(l_1_indent),
                    '  const unsigned bits = __float_as_uint(scale_of_tile);\n',
                    str(l_1_indent),
                    '  if (column % kTile == 0) store_words1(target - column + kLoraRank + column / kTile * 4, &bits);\n',
                    str(l_1_indent),
                    '} else {\n',
                    str(l_1_indent),
                    '  target += kLoraRank / kTile * 4 + (column - kLoraRank);\n',
                    str(l_1_indent),
                    '  ',
                    str(context.call((undefined(name='put_elements') if l_0_put_elements is missing else l_0_put_elements), False)),
                    '\n',
                    str(l_1_indent),
                    '}',
                ))
            else:
                pass
                t_8.extend((
                    str(l_1_indent),
                    str((context.call((undefined(name='put_codes') if l_0_put_codes is missing else l_0_put_codes), (undefined(name='kv_scaled') if l_0_kv_scaled is missing else l_0_kv_scaled)) if (undefined(name='kv_codes') if l_0_kv_codes is missing else l_0_kv_codes) else context.call((undefined(name='put_elements') if l_0_put_elements is missing else l_0_put_elements), False))),
                ))
            return concat(t_8)
        context.exported_vars.add('put_cache')
        context.vars['put_cache'] = l_0_put_cache = Macro(environment, macro, 'put_cache', ('indent',), False, False, False, context.eval_ctx.autoescape)
        if (((undefined(name='both') if l_0_both is missing else l_0_both) and (undefined(name='q_codes') if l_0_q_codes is missing else l_0_q_codes)) and (undefined(name='kv_codes') if l_0_kv_codes is missing else l_0_kv_codes)):
            pass
            yield '  '
            yield str(context.call((undefined(name='put_codes') if l_0_put_codes is missing else l_0_put_codes), (undefined(name='scaled') if l_0_scaled is missing else l_0_scaled)))
            yield '\n'
        elif ((((undefined(name='both') if l_0_both is missing else l_0_both) and (undefined(name='q_elements') if l_0_q_elements is missing else l_0_q_elements)) and (undefined(name='kv_elements') if l_0_kv_elements is missing else l_0_kv_elements)) and (not (undefined(name='q_scaled') if l_0_q_scaled is missing else l_0_q_scaled))):
            pass
            yield '  '
            yield str(context.call((undefined(name='put_elements') if l_0_put_elements is missing else l_0_put_elements), False))
            yield '\n'
        elif (undefined(name='both') if l_0_both is missing else l_0_both):
            pass
            yield '  if (is_query) {\n    '
            yield str(context.call((undefined(name='put_query') if l_0_put_query is missing else l_0_put_query)))
            yield '\n  } else {\n'
            yield str(context.call((undefined(name='put_cache') if l_0_put_cache is missing else l_0_put_cache), '    '))
            yield '\n  }\n'
        elif environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'write_q'):
            pass
            yield '  '
            yield str(context.call((undefined(name='put_query') if l_0_put_query is missing else l_0_put_query)))
            yield '\n'
        else:
            pass
            yield str(context.call((undefined(name='put_cache') if l_0_put_cache is missing else l_0_put_cache), '  '))
            yield '\n'
        yield '}\n'

    blocks = {}
    debug_info = '1=22&2=25&3=28&4=31&5=34&6=37&7=40&8=43&9=46&10=49&11=52&12=55&13=58&14=62&18=64&19=68&21=72&22=74&24=76&26=78&27=81&29=83&30=86&32=89&33=91&34=93&35=96&37=98&38=101&40=103&41=106&43=108&44=111&45=113&47=115&48=118&50=120&51=124&54=130&56=137&57=143&59=146&61=152&63=155&65=161&67=164&69=170&70=184&72=196&73=198&74=202&75=205&76=209&82=216&83=219&86=222&87=225&88=228&89=231&90=234&91=237&92=240&93=243&94=254&95=257&96=261&98=269&100=275&105=284&107=287&109=289&111=291&112=293&114=297&116=299&119=303&120=305&121=308&122=310&128=313&138=316&139=318&140=321&141=325&143=327&146=330&149=333&153=337&154=340&155=343&156=349&157=353&158=355&160=363&162=366&164=368&165=370&167=372&168=375&169=377&173=380&174=393&175=401&177=422&178=431&179=436&180=439&181=441&182=443&183=445&184=447&185=449&186=451&187=453&188=457&190=463&193=469&194=472&195=474&196=477&197=479&199=482&201=484&203=486&204=489&206=493'
    return {"__file__": "mla_prepare.cu.j2", "name": name, "root": root, "blocks": blocks, "debug_info": debug_info}


TEMPLATES["mla_prepare.cu.j2"] = _mla_prepare_cu_j2


def _rope_cuh_j2(environment):
    from jinja2.runtime import LoopContext, Macro, Markup, Namespace, TemplateNotFound, TemplateReference, TemplateRuntimeError, Undefined, escape, identity, internalcode, markup_join, missing, str_join
    name = 'rope.cuh.j2'

    def root(context, missing=missing):
        resolve = context.resolve_or_missing
        undefined = environment.undefined
        concat = environment.concat
        cond_expr_undefined = Undefined
        if 0: yield None
        l_0_spec = resolve('spec')
        l_0_angles = resolve('angles')
        l_0_words = resolve('words')
        l_0_half = l_0_vector_halves = missing
        try:
            t_1 = environment.filters['min']
        except KeyError:
            @internalcode
            def t_1(*unused):
                raise TemplateRuntimeError("No filter named 'min' found.")
        pass
        yield '// A rotation is two products and one sum, each rounded once: a * cos - b * sin, never a fused\n// multiply-add, so that any fp32 arithmetic gives the same bits.\n'
        l_0_half = (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'rope_dim') // 2)
        context.vars['half'] = l_0_half
        context.exported_vars.add('half')
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'rope') == 'interleaved'):
            pass
            l_0_angles = (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'elements_per_thread') // 2)
            context.vars['angles'] = l_0_angles
            context.exported_vars.add('angles')
        else:
            pass
            l_0_angles = environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'elements_per_thread')
            context.vars['angles'] = l_0_angles
            context.exported_vars.add('angles')
        l_0_vector_halves = ((environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'rope') == 'interleaved') or (((undefined(name='half') if l_0_half is missing else l_0_half) % environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'elements_per_thread')) == 0))
        context.vars['vector_halves'] = l_0_vector_halves
        context.exported_vars.add('vector_halves')
        yield 'constexpr unsigned kHalf = '
        yield str((undefined(name='half') if l_0_half is missing else l_0_half))
        yield ';\nconstexpr unsigned kAngles = '
        yield str((undefined(name='angles') if l_0_angles is missing else l_0_angles))
        yield ';\n\nstruct Rotation {\n  float cosine[kAngles], sine[kAngles];\n'
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'rope') == 'neox'):
            pass
            yield '  Values other;  // the elements half a row away that these turn with\n'
        yield "};\n\n// cos_sin is a row [cos | sin] of fp32, column the first of this thread's rotary columns.\n__device__ __forceinline__ Rotation load_rotation(const float* cos_sin, const Element* source, unsigned column) {\n  Rotation rotation;\n"
        if (undefined(name='vector_halves') if l_0_vector_halves is missing else l_0_vector_halves):
            pass
            l_0_words = t_1(environment, [(undefined(name='angles') if l_0_angles is missing else l_0_angles), 4])
            context.vars['words'] = l_0_words
            context.exported_vars.add('words')
            if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'rope') == 'interleaved'):
                pass
                yield '  const float* angle = cos_sin + column / 2;\n'
            else:
                pass
                yield '  const bool first_half = column < kHalf;\n  const float* angle = cos_sin + (first_half ? column : column - kHalf);\n  rotation.other = to_values(load_elements(first_half ? source + kHalf : source - kHalf));\n'
            yield '  unsigned cosine[kAngles], sine[kAngles];\n#pragma unroll\n  for (unsigned i = 0; i < kAngles; i += '
            yield str((undefined(name='words') if l_0_words is missing else l_0_words))
            yield ') {\n    load_words'
            yield str((undefined(name='words') if l_0_words is missing else l_0_words))
            yield '(angle + i, cosine + i);\n    load_words'
            yield str((undefined(name='words') if l_0_words is missing else l_0_words))
            yield '(angle + kHalf + i, sine + i);\n  }\n#pragma unroll\n  for (unsigned i = 0; i < kAngles; ++i) {\n    rotation.cosine[i] = __uint_as_float(cosine[i]);\n    rotation.sine[i] = '
            yield str(('first_half ? __uint_as_float(sine[i]) : -__uint_as_float(sine[i])' if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'rope') == 'neox') else '__uint_as_float(sine[i])'))
            yield ';\n  }\n'
        else:
            pass
            yield "  // The halves meet inside a thread's elements: each finds its own partner.\n#pragma unroll\n  for (unsigned i = 0; i < kAngles; ++i) {\n    const bool first_half = column + i < kHalf;\n    const unsigned angle = first_half ? column + i : column + i - kHalf;\n    unsigned cosine, sine;\n    load_words1(cos_sin + angle, &cosine);\n    load_words1(cos_sin + kHalf + angle, &sine);\n    rotation.other.v[i] = element_to_float(load_element(first_half ? source + i + kHalf : source + i - kHalf));\n    rotation.cosine[i] = __uint_as_float(cosine);\n    rotation.sine[i] = first_half ? __uint_as_float(sine) : -__uint_as_float(sine);\n  }\n"
        yield '  return rotation;\n}\n\n__device__ __forceinline__ Values rotate(const Values& values, const Rotation& rotation) {\n  Values rotated;\n#pragma unroll\n'
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'rope') == 'interleaved'):
            pass
            yield '  for (unsigned i = 0; i < kAngles; ++i) {\n    const float a = values.v[2 * i], b = values.v[2 * i + 1], cosine = rotation.cosine[i], sine = rotation.sine[i];\n    rotated.v[2 * i] = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));\n    rotated.v[2 * i + 1] = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));\n  }\n'
        else:
            pass
            yield '  for (unsigned i = 0; i < kAngles; ++i)\n    rotated.v[i] = __fsub_rn(__fmul_rn(values.v[i], rotation.cosine[i]),\n                             __fmul_rn(rotation.other.v[i], rotation.sine[i]));\n'
        yield '  return rotated;\n}\n'

    blocks = {}
    debug_info = '4=22&5=25&6=27&8=32&10=35&11=39&12=41&16=43&24=47&25=49&26=52&35=59&36=61&37=63&42=65&64=71'
    return {"__file__": "rope.cuh.j2", "name": name, "root": root, "blocks": blocks, "debug_info": debug_info}


TEMPLATES["rope.cuh.j2"] = _rope_cuh_j2


def _scatter_cuh_j2(environment):
    from jinja2.runtime import LoopContext, Macro, Markup, Namespace, TemplateNotFound, TemplateReference, TemplateRuntimeError, Undefined, escape, identity, internalcode, markup_join, missing, str_join
    name = 'scatter.cuh.j2'

    def root(context, missing=missing):
        resolve = context.resolve_or_missing
        undefined = environment.undefined
        concat = environment.concat
        cond_expr_undefined = Undefined
        if 0: yield None
        l_0_spec = resolve('spec')
        pass
        yield '// The row of a slot, or -1 where this rank writes none.\n__device__ __forceinline__ long long cache_row(\n    long long slot, long long cache_rows'
        if environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'reserved_slot'):
            pass
            yield ', long long reserved_slot'
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'dcp_world') > 1):
            pass
            yield ', unsigned dcp_rank'
        yield ') {\n  if (slot < 0) return -1;\n'
        if environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'reserved_slot'):
            pass
            yield '  if (slot == reserved_slot) return -1;\n'
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'dcp_world') > 1):
            pass
            yield '  // Unsigned from here on: division of a negative slot would round towards zero, unlike the owner rule.\n  const unsigned long long index = static_cast<unsigned long long>(slot);\n  const unsigned long long turn = index / kDcpInterleave;\n  if (turn % kDcpWorld != dcp_rank) return -1;\n  const long long row = static_cast<long long>(turn / kDcpWorld * kDcpInterleave + index % kDcpInterleave);\n'
        else:
            pass
            yield '  const long long row = slot;\n'
        yield '  return row < cache_rows ? row : -1;\n}\n'

    blocks = {}
    debug_info = '5=13&6=16&8=20&11=23'
    return {"__file__": "scatter.cuh.j2", "name": name, "root": root, "blocks": blocks, "debug_info": debug_info}


TEMPLATES["scatter.cuh.j2"] = _scatter_cuh_j2


def _tile_cuh_j2(environment):
    from jinja2.runtime import LoopContext, Macro, Markup, Namespace, TemplateNotFound, TemplateReference, TemplateRuntimeError, Undefined, escape, identity, internalcode, markup_join, missing, str_join
    name = 'tile.cuh.j2'

    def root(context, missing=missing):
        resolve = context.resolve_or_missing
        undefined = environment.undefined
        concat = environment.concat
        cond_expr_undefined = Undefined
        if 0: yield None
        l_0_tile = resolve('tile')
        l_0_spec = resolve('spec')
        pass
        yield 'constexpr unsigned kTile = '
        yield str((undefined(name='tile') if l_0_tile is missing else l_0_tile))
        yield ";\nconstexpr unsigned kTileThreads = kTile / kElementsPerThread;\n\n#ifdef __CUDACC__\n// The largest value among the threads of a tile. They are neighbours in one warp and all of them call.\n__device__ __forceinline__ float tile_max(float value) {\n  const unsigned lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;\n  const unsigned mask = (0xffffffffu >> (32 - kTileThreads)) << (lane / kTileThreads * kTileThreads);\n#pragma unroll\n  for (unsigned offset = kTileThreads / 2; offset; offset /= 2)\n    value = fmaxf(value, __shfl_xor_sync(mask, value, offset));\n  return value;\n}\n#endif\n\n// The divisor that brings a tile's largest magnitude to 448; NaN has no magnitude.\n__device__ __forceinline__ float tile_scale(const Values& values) {\n  float largest = 0.0f;\n#pragma unroll\n  for (unsigned i = 0; i < kElementsPerThread; ++i) largest = fmaxf(largest, fabsf(values.v[i]));\n  const float scale = __fdiv_rn(tile_max(largest), 448.0f);\n"
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'tile_scale') == 'pow2'):
            pass
            yield '  // The next power of two: a carry out of the fraction raises the exponent, and infinity stays.\n  return __uint_as_float((__float_as_uint(fmaxf(scale, 1e-4f)) + 0x7fffffu) & 0x7f800000u);\n'
        else:
            pass
            yield '  return fmaxf(scale, 1.17549435e-38f);  // the smallest normal, so that a zero tile stores zeros\n'
        yield '}\n\n__device__ __forceinline__ Values operator/(Values values, float scale) {\n'
        if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'tile_scale') == 'pow2'):
            pass
            yield '  // The reciprocal of a power of two is exact, so this rounds as the division does.\n  const float inverse = __fdiv_rn(1.0f, scale);\n'
        yield '#pragma unroll\n  for (unsigned i = 0; i < kElementsPerThread; ++i) values.v[i] = '
        yield str(('__fmul_rn(values.v[i], inverse)' if (environment.getattr((undefined(name='spec') if l_0_spec is missing else l_0_spec), 'tile_scale') == 'pow2') else '__fdiv_rn(values.v[i], scale)'))
        yield ';\n  return values;\n}\n'

    blocks = {}
    debug_info = '2=14&23=16&32=23&37=27'
    return {"__file__": "tile.cuh.j2", "name": name, "root": root, "blocks": blocks, "debug_info": debug_info}


TEMPLATES["tile.cuh.j2"] = _tile_cuh_j2
