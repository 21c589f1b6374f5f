/* cuda/emulator/controls.h - what the tests choose and learn of the emulated cards; the symbols of
 * the emulated library alone. Included by device.cu. */
#ifndef TINSMITH_CUDA_EMULATOR_CONTROLS_H
#define TINSMITH_CUDA_EMULATOR_CONTROLS_H

/* The order of warps and blocks, an emulate::Order, from a seed on. */
extern "C" TINSMITH_EXPORT void cuda_emulated_order(int order, uint64_t seed)
{
    std::lock_guard<std::mutex> guard(emulate::gpu.mutex);
    emulate::order_begin((emulate::Order)order, seed);
}

/* Whether work waits until the host waits for it, and whether tensor cores cut their sums; once
 * the work that waits is done. */
extern "C" TINSMITH_EXPORT void cuda_emulated_mode(int lazy, int truncates)
{
    std::lock_guard<std::recursive_mutex> guard(emulate::machine.work);
    for (CardStream *stream : emulate::machine.streams)
        emulate::stream_drive(stream, stream->taken);
    emulate::machine.lazy = lazy;
    emulate::gpu.truncates = truncates;
}

/* How many cards the machine has, at most CARDS_MOST. */
extern "C" TINSMITH_EXPORT void cuda_emulated_cards(int count)
{
    emulate::machine.count = count;
}

/* Simulates a first card with this much free memory, a driver for that version of CUDA (13000 is
 * 13.0), and that compute capability. */
extern "C" TINSMITH_EXPORT void cuda_emulated_card(size_t free_bytes, int driver, int major,
                                                   int minor)
{
    emulate::Card &card = emulate::machine.cards[0];
    card.bytes = card.used + free_bytes;
    card.major = major;
    card.minor = minor;
    emulate::machine.driver = driver;
}

/* The first card as it is when nothing was simulated. */
extern "C" TINSMITH_EXPORT void cuda_emulated_itself(void)
{
    const emulate::Card own;
    emulate::Card &card = emulate::machine.cards[0];
    card.bytes = own.bytes;
    card.major = own.major;
    card.minor = own.minor;
    emulate::machine.driver = CUDART_VERSION;
}

/* Shared memory that a block may have on cards that are opened from now on. */
extern "C" TINSMITH_EXPORT void cuda_emulated_shared(size_t bytes)
{
    for (emulate::Card &card : emulate::machine.cards) card.shared_bytes = bytes;
}

/* Bytes that are allocated on a card. */
extern "C" TINSMITH_EXPORT size_t cuda_emulated_used(int ordinal)
{
    return emulate::machine.cards[ordinal].used;
}

/* The calling thread's current card. */
extern "C" TINSMITH_EXPORT int cuda_emulated_current(int ordinal)
{
    int before = emulate::current;
    if (ordinal >= 0) emulate::current = ordinal;
    return before;
}

/* The number of times that the host has waited for the first card. */
extern "C" TINSMITH_EXPORT int64_t cuda_emulated_waits(void)
{
    return emulate::machine.cards[0].waits;
}

/* How much work of a Kind the first card has been given. */
extern "C" TINSMITH_EXPORT int64_t cuda_emulated_given(int kind)
{
    return emulate::machine.cards[0].given[kind];
}

/* Where the number of the launch or other work is that is being done, from 1 on; 0: none. */
extern "C" TINSMITH_EXPORT const uint64_t *cuda_emulated_work(void)
{
    return &emulate::machine.work_now;
}

/* The blocks of memory on all cards. Returns how many there are. */
extern "C" TINSMITH_EXPORT int cuda_emulated_blocks(const char **at, size_t *bytes, int room)
{
    std::lock_guard<std::mutex> guard(emulate::machine.lock);
    int count = 0;
    for (auto &block : emulate::machine.blocks) {
        if (block.second.card < 0 || room-- <= 0) continue;
        *at++ = block.first;
        *bytes++ = block.second.bytes;
        count++;
    }
    return count;
}

/* The scratch sizes of ops on the first card since the last call, of those that ran or of those
 * that were rehearsed. Returns how many there are. */
extern "C" TINSMITH_EXPORT int cuda_emulated_scratch(int rehearsed, size_t *sizes, int room)
{
    std::set<size_t> asked;
    asked.swap(emulate::machine.cards[0].asked[rehearsed]);
    for (size_t size : asked)
        if (room-- > 0) *sizes++ = size;
    return (int)asked.size();
}

/* The first card is lost at the launch or copy after so many more; −1: it works again. */
extern "C" TINSMITH_EXPORT void cuda_emulated_lose(int64_t after)
{
    emulate::machine.cards[0].lost_in = after;
    if (after < 0) emulate::machine.cards[0].lost = false;
}

/* The launch or copy after so many more fails, once; −1: none. */
extern "C" TINSMITH_EXPORT void cuda_emulated_fail(int64_t after)
{
    emulate::machine.cards[0].fails_in = after;
}

#endif
