package accelerate

import (
	"context"
	"errors"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/accelerate/rules"
	"pilaster.io/pilaster/internal/oncache"
)

// ruleReport is what a reading of the rules found.
type ruleReport struct {
	rules.Report
	err error
}

// readRules takes about 50 µs a rule, and so a second on a node with 20,000.
func readRules(ctx context.Context, marks uint32) ruleReport {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r, err := rules.Read(ctx, marks)
	counts, failed := tracked()
	r.Tracks = r.Tracks || counts
	return ruleReport{r, errors.Join(err, failed)}
}

// applyRules makes the state what was found. Rules that are not known are a problem too.
func (d *daemon) applyRules(r ruleReport) error {
	if r.err != nil {
		d.problem(problemRules, r.err.Error())
		return r.err
	}
	d.problem(problemRules, r.Unsafe...)
	changed := d.tracks != r.Tracks
	d.tracks = r.Tracks
	if changed && d.cache != nil {
		d.reopen()
	}
	return nil
}

// voider voids the cache while the loop may wait for the kernel: a request about a device takes as long as other
// processes keep the lock of all devices.
type voider struct {
	mu    sync.Mutex
	cache *oncache.Cache // nil: there is nothing to void
}

func (v *voider) set(c *oncache.Cache) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cache = c
}

// void makes all flows pass the rules again.
func (v *voider) void() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.cache == nil {
		return nil
	}
	return v.cache.Void()
}

func rulesHaveChanged(b batch) bool {
	return b.lost || slices.ContainsFunc(b.messages, func(m syscall.NetlinkMessage) bool {
		return m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN
	})
}

// rulesEvent follows a change of rules, after which voiding the cache returned an error or nil.
func (d *daemon) rulesEvent(err error) {
	d.rulesChanged = true
	if d.cache == nil {
		return
	}
	d.evicted[causeNftables]++
	if err != nil {
		d.evictionFailed(causeNftables, err)
	}
}

// maxReadingInterval bounds the time after which rules that have changed are read.
const maxReadingInterval = time.Second

func (d *daemon) startReading(ctx context.Context) {
	d.rulesChanged, d.reading, d.lastReading = false, true, time.Now()
	d.passes.Go(func() { d.rulesRead <- readRules(ctx, d.MarkMask) })
}

// rulesAreRead ends a reading. Of the time, readings may take a tenth as long as that is possible.
func (d *daemon) rulesAreRead(r ruleReport) {
	d.reading = false
	d.readingInterval = min(max(passInterval, 10*time.Since(d.lastReading)), maxReadingInterval)
	if err := d.applyRules(r); err != nil {
		d.Log.Warn("the rules are not known", "err", err)
	}
}
