/* The remembered-launch table of mlaprep.clients.layouts, for workers whose torch has the C exchange API.
 *
 * One call compares what a launch depends on (types, shapes, strides, dtypes, devices, alignment, options) with
 * what was remembered, allocates the result and enqueues the kernel. Whatever it does not know is a miss, which
 * Python answers. LayoutTable in layouts.py is the same table in Python and says what each argument is.
 *
 * Tensors are read through `torch.Tensor.__dlpack_c_exchange_api__`, a table of C functions that fills in a
 * borrowed description of a tensor. No DLPack capsule is made and no ownership moves: only addresses cross over.
 */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define MAX_SLOTS 32
#define MAX_DIMS 4
#define MAX_WORDS (MAX_SLOTS * (1 + 2 * MAX_DIMS))
#define MAX_ARGUMENTS 32
#define BUCKETS 1024
#define CANONICAL 11
#define ALIGNMENT 31 /* low address bits that coverage may look at: the widest load is 32 bytes */

/* dlpack.h, version 1.x: the parts that are read here. */

typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} Description;

typedef struct {
    struct { uint32_t major, minor; } version;
    void *previous;
    void *allocate, *from_object, *to_object;
    int (*describe)(void *object, Description *out);
    void *work_stream;
} ExchangeApi;

/* cuda.h: the launch configuration and its one attribute. */

typedef struct {
    int id, pad;
    int value[16];
} LaunchAttribute;

typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    LaunchAttribute *attributes;
    unsigned attribute_count;
} LaunchConfig;

#define PROGRAMMATIC_STREAM_SERIALIZATION 6

typedef struct {
    int (*launch)(const LaunchConfig *, void *function, void **arguments, void **extra);
    int (*get_context)(void **context);
    int (*push_context)(void *context);
    int (*pop_context)(void **context);
    void *function, *context;
    int pdl;
    unsigned grid[3], block[3];
} NativeLaunch;

/* One remembered layout. Counted by hand under the GIL: a call that runs Python code may see the table cleared. */
typedef struct Entry {
    struct Entry *next;
    int references;
    uint64_t hash;
    int slots, words;
    int64_t *key;
    PyObject **names;  /* of the keyword slots, NULL for positional ones */
    PyObject **values; /* of the slots that hold no tensor, NULL for the others */
    int8_t canonical[CANONICAL]; /* slot of each tensor that PreparedLaunch.run takes, -1 for none */
    PyObject *plan;
    int native;
    NativeLaunch launch;
    int pointers, scalars;
    int8_t pointer_slot[MAX_ARGUMENTS]; /* -1: the result */
    int64_t scalar[MAX_ARGUMENTS];
    PyObject *like;   /* a tensor of the result's shape and type, or None where none is made */
    PyObject *stream; /* device -> raw stream */
    PyObject *device;
    PyObject *refuse; /* raises for a CUresult */
} Entry;

typedef struct {
    PyObject_HEAD
    const ExchangeApi *api;
    PyObject *types; /* a tuple of the tensor types that are read as they are */
    PyObject *is_negative, *empty_like, *run;
    Py_ssize_t limit, count;
    unsigned long long hits;
    pid_t pid;
    Entry *bucket[BUCKETS];
} Table;

/* What one call was made with. */
typedef struct {
    int slots, words;
    uint64_t hash;
    PyObject *name[MAX_SLOTS];
    PyObject *value[MAX_SLOTS];
    void *address[MAX_SLOTS]; /* of the tensors */
    int64_t key[MAX_WORDS];
} Call;

static int is_tensor(const Table *table, PyObject *value)
{
    PyObject *type = (PyObject *)Py_TYPE(value);
    for (Py_ssize_t index = 0, count = PyTuple_Size(table->types); index < count; index++)
        if (PyTuple_GetItem(table->types, index) == type)
            return 1;
    return 0;
}

/* Options are compared by value and exact type, so that True is not taken for a remembered 1. */
static int is_option(PyObject *value)
{
    return value == Py_None || value == Py_True || value == Py_False || PyLong_CheckExact(value) ||
           PyUnicode_CheckExact(value);
}

static int same_option(PyObject *one, PyObject *other)
{
    if (one == other)
        return 1;
    if (Py_TYPE(one) != Py_TYPE(other))
        return 0;
    if (PyUnicode_CheckExact(one))
        return PyUnicode_Compare(one, other) == 0;
    if (!PyLong_CheckExact(one))
        return 0;
    int equal = PyObject_RichCompareBool(one, other, Py_EQ);
    if (equal < 0)
        PyErr_Clear();
    return equal > 0;
}

/* Whether a tensor may be lazily negated: torch makes such a tensor of the wider floating-point types alone, as the
 * imaginary part of a conjugate. To ask costs 0.1 µs a tensor. */
static int may_be_negative(const Description *found)
{
    enum { FLOAT = 2, BFLOAT = 4 };
    return found->dtype.code == FLOAT || found->dtype.code == BFLOAT;
}

/* Adds one tensor to the key. 1 if it can be part of one, 0 if not, -1 with an error that is the caller's. */
static int add_tensor(const Table *table, Call *call, PyObject *tensor, int slot)
{
    Description found;
    memset(&found, 0, sizeof found);
    if (table->api->describe(tensor, &found) != 0) {
        PyErr_Clear(); /* a wrapper without memory: Python says what it is */
        return 0;
    }
    if (found.ndim < 0 || found.ndim > MAX_DIMS || found.dtype.lanes != 1)
        return 0;
    if (found.ndim && (!found.shape || !found.strides))
        return 0;
    if (may_be_negative(&found)) {
        PyObject *negative = PyObject_CallFunctionObjArgs(table->is_negative, tensor, NULL);
        if (negative == NULL) {
            PyErr_Clear();
            return 0;
        }
        int plain = negative == Py_False;
        Py_DECREF(negative);
        if (!plain) /* it is read through a copy */
            return 0;
    }
    char *address = (char *)found.data + found.byte_offset;
    int64_t elements = 1, *word = call->key + call->words;
    *word++ = (int64_t)(((uint64_t)found.ndim << 56) | ((uint64_t)((uintptr_t)address & ALIGNMENT) << 48) |
                        ((uint64_t)found.dtype.code << 40) | ((uint64_t)found.dtype.bits << 32) |
                        ((uint64_t)(found.device.type & 0xffff) << 16) | (uint64_t)(found.device.id & 0xffff));
    for (int dim = 0; dim < found.ndim; dim++) {
        elements *= found.shape[dim];
        *word++ = found.shape[dim];
        *word++ = found.strides[dim];
    }
    if (address == NULL && elements != 0) /* a freed storage */
        return 0;
    call->words = (int)(word - call->key);
    call->address[slot] = address;
    return 1;
}

static int add_slot(const Table *table, Call *call, PyObject *name, PyObject *value)
{
    if (call->slots == MAX_SLOTS)
        return 0;
    int slot = call->slots++;
    call->name[slot] = name;
    call->value[slot] = value;
    if (is_tensor(table, value))
        return add_tensor(table, call, value, slot);
    call->address[slot] = NULL;
    call->key[call->words++] = -1; /* no tensor has this word: its number of dimensions would be 255 */
    return is_option(value);
}

static int read_call(const Table *table, Call *call, PyObject *positional, PyObject *keywords)
{
    call->slots = call->words = 0;
    Py_ssize_t count = PyTuple_Size(positional);
    for (Py_ssize_t index = 0; index < count; index++)
        if (!add_slot(table, call, NULL, PyTuple_GetItem(positional, index)))
            return 0;
    Py_ssize_t position = 0;
    PyObject *name, *value;
    while (PyDict_Next(keywords, &position, &name, &value))
        if (!PyUnicode_CheckExact(name) || !add_slot(table, call, name, value))
            return 0;
    uint64_t hash = 0x9e3779b97f4a7c15u + (uint64_t)call->slots;
    for (int word = 0; word < call->words; word++) {
        hash = (hash ^ (uint64_t)call->key[word]) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    call->hash = hash;
    return 1;
}

static Entry *find(const Table *table, const Call *call)
{
    for (Entry *entry = table->bucket[call->hash % BUCKETS]; entry; entry = entry->next) {
        if (entry->hash != call->hash || entry->slots != call->slots || entry->words != call->words ||
            memcmp(entry->key, call->key, (size_t)call->words * sizeof(int64_t)) != 0)
            continue;
        int slot = 0;
        for (; slot < call->slots; slot++) {
            PyObject *name = entry->names[slot], *value = entry->values[slot];
            if (name != call->name[slot] &&
                (!name || !call->name[slot] || PyUnicode_Compare(name, call->name[slot]) != 0))
                break;
            if (value && !same_option(value, call->value[slot]))
                break;
        }
        if (slot == call->slots)
            return entry;
    }
    return NULL;
}

static void release(Entry *entry)
{
    if (--entry->references)
        return;
    for (int slot = 0; slot < entry->slots; slot++) {
        Py_XDECREF(entry->names[slot]);
        Py_XDECREF(entry->values[slot]);
    }
    Py_XDECREF(entry->plan);
    Py_XDECREF(entry->like);
    Py_XDECREF(entry->stream);
    Py_XDECREF(entry->device);
    Py_XDECREF(entry->refuse);
    PyMem_Free(entry->names);
    PyMem_Free(entry->values);
    PyMem_Free(entry->key);
    PyMem_Free(entry);
}

static void forget_all(Table *table)
{
    Entry *all[BUCKETS];
    memcpy(all, table->bucket, sizeof all);
    memset(table->bucket, 0, sizeof table->bucket);
    table->count = 0;
    for (int index = 0; index < BUCKETS; index++)
        for (Entry *entry = all[index], *next; entry; entry = next) {
            next = entry->next;
            release(entry);
        }
}

static PyObject *run_plan(const Table *table, const Entry *entry, const Call *call)
{
    PyObject *tensors = PyTuple_New(CANONICAL);
    if (tensors == NULL)
        return NULL;
    for (int index = 0; index < CANONICAL; index++) {
        PyObject *value = entry->canonical[index] < 0 ? Py_None : call->value[entry->canonical[index]];
        Py_INCREF(value);
        PyTuple_SetItem(tensors, index, value);
    }
    PyObject *result = PyObject_CallMethodObjArgs(entry->plan, table->run, tensors, NULL);
    Py_DECREF(tensors);
    return result;
}

static int enqueue(const NativeLaunch *native, void *stream, void **arguments)
{
    LaunchAttribute attribute = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value = {1}};
    LaunchConfig config = {
        .grid = {native->grid[0], native->grid[1], native->grid[2]},
        .block = {native->block[0], native->block[1], native->block[2]},
        .stream = stream,
        .attributes = &attribute,
        .attribute_count = native->pdl ? 1 : 0,
    };
    void *current = NULL;
    int result = native->get_context(&current);
    if (result == 0 && current == native->context)
        return native->launch(&config, native->function, arguments, NULL);
    result = native->push_context(native->context);
    if (result != 0)
        return result;
    result = native->launch(&config, native->function, arguments, NULL);
    native->pop_context(&current);
    return result;
}

static PyObject *run_native(const Table *table, const Entry *entry, const Call *call)
{
    PyObject *query = NULL;
    void *query_address = NULL;
    if (entry->like != Py_None) {
        query = PyObject_CallFunctionObjArgs(table->empty_like, entry->like, NULL);
        Description made;
        if (query == NULL || table->api->describe(query, &made) != 0) {
            Py_XDECREF(query);
            return NULL;
        }
        query_address = made.data;
    } else if (entry->canonical[CANONICAL - 1] >= 0) {
        int slot = entry->canonical[CANONICAL - 1];
        if (call->value[slot] != Py_None) {
            query = call->value[slot];
            Py_INCREF(query);
            query_address = call->address[slot];
        }
    }
    PyObject *number = PyObject_CallFunctionObjArgs(entry->stream, entry->device, NULL);
    if (number == NULL) {
        Py_XDECREF(query);
        return NULL;
    }
    void *stream = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    if (stream == NULL && PyErr_Occurred()) {
        Py_XDECREF(query);
        return NULL;
    }
    uint64_t storage[MAX_ARGUMENTS * 2];
    void *arguments[MAX_ARGUMENTS * 2];
    int count = 0;
    for (int index = 0; index < entry->pointers; index++, count++) {
        int slot = entry->pointer_slot[index];
        storage[count] = (uint64_t)(uintptr_t)(slot < 0 ? query_address : call->address[slot]);
    }
    for (int index = 0; index < entry->scalars; index++, count++)
        storage[count] = (uint64_t)entry->scalar[index]; /* little-endian: a u32 is its first four bytes */
    for (int index = 0; index < count; index++)
        arguments[index] = &storage[index];
    int result = enqueue(&entry->launch, stream, arguments);
    if (result != 0) {
        Py_XDECREF(query);
        PyObject *said = PyObject_CallFunction(entry->refuse, "i", result);
        if (said != NULL) {
            Py_DECREF(said);
            PyErr_SetString(PyExc_RuntimeError, "a refused launch raised nothing");
        }
        return NULL;
    }
    if (query == NULL) {
        Py_INCREF(Py_None);
        query = Py_None;
    }
    return query;
}

static int check_arguments(Py_ssize_t given, PyObject *const *arguments, Py_ssize_t wanted)
{
    if (given == wanted && PyTuple_CheckExact(arguments[0]) && PyDict_CheckExact(arguments[1]))
        return 1;
    PyErr_Format(PyExc_TypeError, "takes a tuple, a dict%s", wanted > 2 ? " and what to remember" : "");
    return 0;
}

static PyObject *table_call(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    Table *table = (Table *)self;
    if (!check_arguments(given, arguments, 2))
        return NULL;
    Call call;
    if (!read_call(table, &call, arguments[0], arguments[1]))
        Py_RETURN_NOTIMPLEMENTED;
    Entry *entry = find(table, &call);
    if (entry == NULL || table->pid != getpid())
        Py_RETURN_NOTIMPLEMENTED;
    entry->references++;
    PyObject *result = entry->native ? run_native(table, entry, &call) : run_plan(table, entry, &call);
    if (result == Py_None) { /* nothing to hand over: the plan says what stands for it */
        Py_DECREF(result);
        result = entry->plan;
        Py_INCREF(result);
    }
    table->hits += result != NULL;
    release(entry);
    return result;
}

static int read_extents(PyObject *extents, unsigned out[3])
{
    return PyArg_ParseTuple(extents, "III", &out[0], &out[1], &out[2]);
}

/* Reads PreparedLaunch.native: None, or the tuple that NativeLaunch in prepared.py describes. */
static int read_native(Entry *entry, PyObject *native, PyObject *stream, PyObject *device)
{
    unsigned long long launch, get, push, pop, function, context;
    PyObject *grid, *block, *pointers, *scalars, *like, *refuse;
    if (!PyArg_ParseTuple(native, "KKKKKKpOOOOOO", &launch, &get, &push, &pop, &function, &context,
                          &entry->launch.pdl, &grid, &block, &pointers, &scalars, &like, &refuse))
        return 0;
    if (!PyTuple_Check(grid) || !PyTuple_Check(block) || !PyTuple_Check(pointers) || !PyTuple_Check(scalars)) {
        PyErr_SetString(PyExc_TypeError, "extents, pointers and scalars are tuples");
        return 0;
    }
    if (!read_extents(grid, entry->launch.grid) || !read_extents(block, entry->launch.block))
        return 0;
    *(void **)&entry->launch.launch = (void *)(uintptr_t)launch;
    *(void **)&entry->launch.get_context = (void *)(uintptr_t)get;
    *(void **)&entry->launch.push_context = (void *)(uintptr_t)push;
    *(void **)&entry->launch.pop_context = (void *)(uintptr_t)pop;
    entry->launch.function = (void *)(uintptr_t)function;
    entry->launch.context = (void *)(uintptr_t)context;
    Py_ssize_t count = PyTuple_Size(pointers), values = PyTuple_Size(scalars);
    if (count > MAX_ARGUMENTS || values > MAX_ARGUMENTS) {
        PyErr_SetString(PyExc_ValueError, "more arguments than any kernel has");
        return 0;
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        long which = PyLong_AsLong(PyTuple_GetItem(pointers, index));
        if (which < 0 || which >= CANONICAL) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "no such tensor");
            return 0;
        }
        int slot = entry->canonical[which];
        if (which == CANONICAL - 1)
            slot = -1;
        else if (slot < 0 || entry->values[slot] != NULL) {
            PyErr_SetString(PyExc_ValueError, "the kernel reads a tensor that the call lacks");
            return 0;
        }
        entry->pointer_slot[index] = (int8_t)slot;
    }
    for (Py_ssize_t index = 0; index < values; index++) {
        entry->scalar[index] = PyLong_AsLongLong(PyTuple_GetItem(scalars, index));
        if (entry->scalar[index] == -1 && PyErr_Occurred())
            return 0;
    }
    entry->pointers = (int)count;
    entry->scalars = (int)values;
    entry->native = 1;
    Py_INCREF(like), Py_INCREF(stream), Py_INCREF(device), Py_INCREF(refuse);
    entry->like = like, entry->stream = stream, entry->device = device, entry->refuse = refuse;
    return 1;
}

static int read_plan(Entry *entry, PyObject *plan)
{
    PyObject *native = PyObject_GetAttrString(plan, "native");
    PyObject *stream = native ? PyObject_GetAttrString(plan, "stream") : NULL;
    PyObject *device = stream ? PyObject_GetAttrString(plan, "ordinal") : NULL;
    int good = device != NULL && (native == Py_None || read_native(entry, native, stream, device));
    Py_XDECREF(native);
    Py_XDECREF(stream);
    Py_XDECREF(device);
    return good;
}

static Entry *new_entry(const Call *call, PyObject *slots, PyObject *plan)
{
    Entry *entry = PyMem_Calloc(1, sizeof *entry);
    if (entry == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    entry->references = 1;
    entry->hash = call->hash;
    entry->words = call->words;
    entry->key = PyMem_Malloc((size_t)(call->words + 1) * sizeof(int64_t));
    entry->names = PyMem_Calloc((size_t)call->slots + 1, sizeof(PyObject *));
    entry->values = PyMem_Calloc((size_t)call->slots + 1, sizeof(PyObject *));
    if (!entry->key || !entry->names || !entry->values) {
        release(entry);
        PyErr_NoMemory();
        return NULL;
    }
    entry->slots = call->slots;
    memcpy(entry->key, call->key, (size_t)call->words * sizeof(int64_t));
    for (int slot = 0; slot < call->slots; slot++) {
        entry->names[slot] = call->name[slot];
        Py_XINCREF(entry->names[slot]);
        if (call->address[slot] == NULL && is_option(call->value[slot])) {
            entry->values[slot] = call->value[slot];
            Py_INCREF(entry->values[slot]);
        }
    }
    entry->plan = plan;
    Py_INCREF(plan);
    for (int index = 0; index < CANONICAL; index++) {
        long slot = PyLong_AsLong(PyTuple_GetItem(slots, index));
        if (slot < -1 || slot >= call->slots || (slot == -1 && PyErr_Occurred())) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "no such slot");
            release(entry);
            return NULL;
        }
        entry->canonical[index] = (int8_t)slot;
    }
    if (!read_plan(entry, plan)) {
        release(entry);
        return NULL;
    }
    return entry;
}

static PyObject *table_add(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    Table *table = (Table *)self;
    if (!check_arguments(given, arguments, 4))
        return NULL;
    if (!PyTuple_CheckExact(arguments[2]) || PyTuple_Size(arguments[2]) != CANONICAL) {
        PyErr_Format(PyExc_TypeError, "slots is a tuple of %d", CANONICAL);
        return NULL;
    }
    Call call;
    if (!read_call(table, &call, arguments[0], arguments[1]))
        Py_RETURN_FALSE;
    Entry *entry = new_entry(&call, arguments[2], arguments[3]);
    if (entry == NULL)
        return NULL;
    if (table->count >= table->limit || table->pid != getpid()) {
        forget_all(table);
        table->pid = getpid();
    }
    /* The newest is found first, so that it stands for an older one of the same key. */
    entry->next = table->bucket[entry->hash % BUCKETS];
    table->bucket[entry->hash % BUCKETS] = entry;
    table->count++;
    Py_RETURN_TRUE;
}

static PyObject *table_clear(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    forget_all((Table *)self);
    ((Table *)self)->pid = getpid();
    Py_RETURN_NONE;
}

static PyObject *table_hits(PyObject *self, void *ignored)
{
    (void)ignored;
    return PyLong_FromUnsignedLongLong(((Table *)self)->hits);
}

static Py_ssize_t table_length(PyObject *self) { return ((Table *)self)->count; }

static PyObject *table_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"api", "types", "is_negative", "empty_like", "limit", NULL};
    PyObject *capsule, *types, *is_negative, *empty_like;
    Py_ssize_t limit;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!OOn", names, &capsule, &PyTuple_Type, &types,
                                     &is_negative, &empty_like, &limit))
        return NULL;
    const ExchangeApi *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (api == NULL)
        return NULL;
    if (api->version.major != 1 || api->describe == NULL || limit < 1) {
        PyErr_SetString(PyExc_ValueError, "no exchange API of version 1, or a limit below 1");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Table *table = (Table *)allocate(type, 0);
    if (table == NULL)
        return NULL;
    table->api = api;
    Py_INCREF(types), Py_INCREF(is_negative), Py_INCREF(empty_like);
    table->types = types;
    table->is_negative = is_negative;
    table->empty_like = empty_like;
    table->run = PyUnicode_InternFromString("run");
    table->limit = limit;
    table->pid = getpid();
    if (table->run == NULL) {
        Py_DECREF(table);
        return NULL;
    }
    return (PyObject *)table;
}

static int table_traverse(PyObject *self, visitproc visit, void *arg)
{
    Table *table = (Table *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(table->types);
    Py_VISIT(table->is_negative);
    Py_VISIT(table->empty_like);
    for (int index = 0; index < BUCKETS; index++)
        for (Entry *entry = table->bucket[index]; entry; entry = entry->next) {
            if (entry->references > 1) /* a running call holds it too */
                continue;
            Py_VISIT(entry->plan);
            Py_VISIT(entry->like);
            Py_VISIT(entry->stream);
            Py_VISIT(entry->refuse);
        }
    return 0;
}

static int table_forget(PyObject *self)
{
    Table *table = (Table *)self;
    forget_all(table);
    Py_CLEAR(table->types);
    Py_CLEAR(table->is_negative);
    Py_CLEAR(table->empty_like);
    Py_CLEAR(table->run);
    return 0;
}

static void table_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    table_forget(self);
    freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release_memory(self);
    Py_DECREF(type);
}

static PyMethodDef table_methods[] = {
    {"call", (PyCFunction)(void (*)(void))table_call, METH_FASTCALL, "Launch what is remembered of this layout."},
    {"add", (PyCFunction)(void (*)(void))table_add, METH_FASTCALL, "Remember a plan for this layout."},
    {"clear", table_clear, METH_NOARGS, "Forget every layout."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef table_properties[] = {
    {"hits", table_hits, NULL, "Calls that were launched from the table.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_traverse, table_traverse},
    {Py_tp_clear, table_forget},
    {Py_tp_methods, table_methods},
    {Py_tp_getset, table_properties},
    {Py_sq_length, table_length},
    {Py_tp_doc, "Launches remembered by layout; see mlaprep.clients.layouts."},
    {0, NULL},
};

static PyType_Spec table_spec = {
    .name = "mlaprep.clients._layouts.NativeLayoutTable",
    .basicsize = sizeof(Table),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = table_slots,
};

static int execute(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &table_spec, NULL);
    int result = type ? PyModule_AddObjectRef(module, "NativeLayoutTable", type) : -1;
    Py_XDECREF(type);
    return result;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_layouts",
    .m_doc = "Launches remembered by layout, in C.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__layouts(void) { return PyModuleDef_Init(&module); }
