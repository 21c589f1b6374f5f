/* cuda/emulator/controls.h - how tests set and query the emulated cards; symbols only of the
 * emulated library. Included by device.cu. */
#ifndef TINSMITH_CUDA_EMULATOR_CONTROLS_H
#define TINSMITH_CUDA_EMULATOR_CONTROLS_H

/* Sets the order of warps and blocks (an emulate::Order) and its seed. */
extern "C" TINSMITH_EXPORT void cuda_emulated_order(int order, uint64_t seed)
{
    std::lock_guard<std::mutex> guard(emulate::gpu.mutex);
    emulate::order_begin((emulate::Order)order, seed);
}

/* Sets whether work is queued until the host waits for it, and whether tensor cores truncate their
 * sums; first finishes queued work. */
extern "C" TINSMITH_EXPORT void cuda_emulated_mode(int lazy, int truncates)
{
    std::lock_guard<std::recursive_mutex> guard(emulate::machine.work);
    for (CardStream *stream : emulate::machine.streams)
        emulate::stream_drive(stream, stream->taken);
    emulate::machine.lazy = lazy;
    emulate::gpu.truncates = truncates;
}

/* Sets the machine's number of cards, at most CARDS_MOST. */
extern "C" TINSMITH_EXPORT void cuda_emulated_cards(int count)
{
    emulate::machine.count = count;
}

/* Gives the first card this much free memory, a driver for this version of CUDA (13000 is 13.0),
 * and this compute capability. */
extern "C" TINSMITH_EXPORT void cuda_emulated_card(size_t free_bytes, int driver, int major,
                                                   int minor)
{
    emulate::Card &card = emulate::machine.cards[0];
    card.bytes = card.used + free_bytes;
    card.major = major;
    card.minor = minor;
    emulate::machine.driver = driver;
}

/* Restores the first card's defaults. */
extern "C" TINSMITH_EXPORT void cuda_emulated_itself(void)
{
    const emulate::Card own;
    emulate::Card &card = emulate::machine.cards[0];
    card.bytes = own.bytes;
    card.major = own.major;
    card.minor = own.minor;
    emulate::machine.driver = CUDART_VERSION;
}

/* Sets the shared memory per block of cards opened from now on. */
extern "C" TINSMITH_EXPORT void cuda_emulated_shared(size_t bytes)
{
    for (emulate::Card &card : emulate::machine.cards) card.shared_bytes = bytes;
}

/* The bytes allocated on a card. */
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

/* How often the host has waited for the first card. */
extern "C" TINSMITH_EXPORT int64_t cuda_emulated_waits(void)
{
    return emulate::machine.cards[0].waits;
}

/* How many works of a Kind the first card has received. */
extern "C" TINSMITH_EXPORT int64_t cuda_emulated_given(int kind)
{
    return emulate::machine.cards[0].given[kind];
}

/* The address of the number of the running launch or other work, from 1 on; 0: none. */
extern "C" TINSMITH_EXPORT const uint64_t *cuda_emulated_work(void)
{
    return &emulate::machine.work_now;
}

/* The blocks of memory on all cards; returns their number. */
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

/* The scratch sizes of ops on the first card since the last call, of ops that ran or were
 * rehearsed; returns their number. */
extern "C" TINSMITH_EXPORT int cuda_emulated_scratch(int rehearsed, size_t *sizes, int room)
{
    std::set<size_t> asked;
    asked.swap(emulate::machine.cards[0].asked[rehearsed]);
    for (size_t size : asked)
        if (room-- > 0) *sizes++ = size;
    return (int)asked.size();
}

/* The first card is lost after `after` more launches or copies; −1: it works again. */
extern "C" TINSMITH_EXPORT void cuda_emulated_lose(int64_t after)
{
    emulate::machine.cards[0].lost_in = after;
    if (after < 0) emulate::machine.cards[0].lost = false;
}

/* After `after` more launches or copies one fails, once; −1: none. */
extern "C" TINSMITH_EXPORT void cuda_emulated_fail(int64_t after)
{
    emulate::machine.cards[0].fails_in = after;
}

#endif
