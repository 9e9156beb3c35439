package oncache

import (
	"fmt"
	"math/bits"

	"golang.org/x/sys/unix"
)

// lastMark is the greatest generation of marks; the next one is 1 again.
func (c Config) lastMark() uint32 {
	return c.MarkMask >> bits.TrailingZeros32(c.MarkMask) >> wayBits
}

// Renew lets the programs use the cache for LeaseTime from now on. If the lease has ended before, changes may have been
// missed meanwhile, so it voids the cache.
func (o *Cache) Renew() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	now, err := monotonic()
	if err != nil {
		return err
	}
	var until uint64
	if err := o.objects.OnceLease.Get(&until); err != nil {
		return fmt.Errorf("oncache: read the lease: %w", err)
	}
	if until <= now {
		if err := o.void(); err != nil {
			return err
		}
	}
	if err := o.objects.OnceLease.Set(now + uint64(LeaseTime)); err != nil {
		return fmt.Errorf("oncache: renew the lease: %w", err)
	}
	return nil
}

// monotonic is the clock of bpf_ktime_get_coarse_ns.
func monotonic() (uint64, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &t); err != nil {
		return 0, fmt.Errorf("oncache: read the clock: %w", err)
	}
	return uint64(t.Nano()), nil
}

// Pause stops learning until Resume. Flows that are in the cache stay there. A packet that the overlay handled before
// Resume is never learnt from, however late it arrives.
func (o *Cache) Pause() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.marks = 0
	return o.publish()
}

// Resume continues to learn after Pause.
func (o *Cache) Resume() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.marks != 0 {
		return nil
	}
	o.resume()
	return o.publish()
}

// Void makes all flows unknown with one write; Pause stays in force. Packets that the overlay handled before are not
// learnt from.
func (o *Cache) Void() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.void()
}

func (o *Cache) void() error {
	o.filter++
	if o.marks != 0 {
		o.resume()
	}
	return o.publish()
}

func (o *Cache) resume() {
	o.nextMark = o.nextMark%o.config.lastMark() + 1
	o.marks = o.nextMark
}

// publish writes the generations, with one store of 8 bytes. What the caller reads afterwards contains all that
// programs have written with former generations, or these programs see the new ones.
func (o *Cache) publish() error {
	if err := o.objects.OnceWord.Set(uint64(o.filter)<<32 | uint64(o.marks)); err != nil {
		return fmt.Errorf("oncache: write the generations: %w", err)
	}
	o.barrier.Add(1) // a full memory barrier
	return nil
}
