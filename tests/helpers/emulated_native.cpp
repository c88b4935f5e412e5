// Calls the native library for another process: emulated_native.py, whose tests run on x86 while this runs under qemu.
//
// A request: the function's number, the count of numbers and the numbers (int64), the count of buffers and each one's
// size (-1 for null) and bytes. The answer: the result (int64), then every buffer's bytes as they are afterwards.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../kernels/csrc/isa.hpp"

using namespace sigmoid_rl;
using Numbers = std::vector<int64_t>;

static void take(void* data, size_t size) {
    if (size && fread(data, size, 1, stdin) != 1) exit(0);  // the tests have ended
}

static int64_t number() {
    int64_t n;
    take(&n, 8);
    return n;
}

template <class F>
static F* function(void* library, const char* name) {
    void* address = dlsym(library, (std::string("sigmoid_rl_") + name).c_str());
    if (!address) fprintf(stderr, "no %s\n", name), exit(1);
    return reinterpret_cast<F*>(address);
}

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) fprintf(stderr, "%s\n", dlerror()), exit(1);
    for (;;) {
        const int64_t which = number();
        Numbers n(number());
        for (int64_t& x : n) x = number();
        std::vector<std::vector<char>> buffers(number());
        std::vector<char*> b;
        for (auto& buffer : buffers) {
            const int64_t size = number();
            buffer.resize(size < 0 ? 0 : size);
            take(buffer.data(), buffer.size());
            b.push_back(size < 0 ? nullptr : buffer.data());
        }
        auto matrix = [&](int i, int at) { return Matrix{b[i], n[at], n[at + 1], n[at + 2], bool(n[at + 3])}; };
        auto floats = [&](int i) { return reinterpret_cast<float*>(b[i]); };
        auto rows = [&](int i, int at) {
            float cap;
            memcpy(&cap, &n[at], 4);
            return Rows{reinterpret_cast<int64_t*>(b[i]), floats(i + 1), cap};
        };
        int64_t result = 0;
        switch (which) {
            case 0: result = function<int()>(library, "version")(); break;
            case 1: {
                const char* name = function<const char*(int64_t)>(library, "isa")(n[0]);
                result = name != nullptr;
                if (name) snprintf(b[0], buffers[0].size(), "%s", name);
                break;
            }
            case 2: result = function<bool(int64_t)>(library, "runs_here")(n[0]); break;
            case 3: function<void(int64_t)>(library, "choose")(n[0]); break;
            case 4: result = function<int()>(library, "chosen")(); break;
            case 5: result = function<bool()>(library, "has_pairs")(); break;
            case 6:
            case 9: {
                const Matrix a = matrix(0, 0), w = matrix(1, 4);
                auto f = function<int(const Matrix*, const Matrix*, float*, int64_t, int64_t)>(
                    library, which == 6 ? "logits" : "d_hidden");
                result = f(&a, &w, floats(2), n[8], n[9]);
                break;
            }
            case 7: {
                const Matrix z = matrix(0, 0);
                const Rows r = rows(1, 4);
                auto f = function<int(const Matrix*, const Rows*, float*, int64_t)>(library, "row_stats");
                result = f(&z, &r, floats(3), n[5]);
                break;
            }
            case 8: {
                const Matrix z = matrix(0, 0);
                const Rows r = rows(1, 4);
                const Coefficients c{floats(3), floats(4), floats(5), floats(6), floats(7)};
                auto f = function<int(const Matrix*, const Rows*, const Coefficients*, bool, int64_t)>(
                    library, "row_grads");
                result = f(&z, &r, &c, n[5], n[6]);
                break;
            }
            case 10: {
                const Matrix dz = matrix(0, 0), h = matrix(1, 4);
                auto f = function<int(const Matrix*, const Matrix*, bool, float*, int64_t, int64_t)>(
                    library, "add_d_weight");
                result = f(&dz, &h, n[8], floats(2), n[9], n[10]);
                break;
            }
            case 11: {
                const Matrix h = matrix(0, 0), w = matrix(1, 4);
                const Rows r = rows(2, 8);
                auto f = function<int(const Matrix*, const Matrix*, const Rows*, float*, int64_t)>(library, "score");
                result = f(&h, &w, &r, floats(4), n[9]);
                break;
            }
        }
        fwrite(&result, 8, 1, stdout);
        for (auto& buffer : buffers) fwrite(buffer.data(), 1, buffer.size(), stdout);
        fflush(stdout);
    }
}
