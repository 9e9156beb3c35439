package accelerate

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/accelerate/overlay"
	"pilaster.io/pilaster/internal/accelerate/rules"
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

// ruleEvents makes all flows pass the rules again.
func (d *daemon) ruleEvents(b batch) {
	changed := b.lost
	for _, m := range b.messages {
		changed = changed || m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN
	}
	if changed {
		d.rulesChanged = true
		d.evict(overlay.Eviction{All: true, Cause: causeNftables})
	}
}

// readingInterval bounds the time that readings take on a node whose rules change all the time.
const readingInterval = time.Second

// startReading has a goroutine read rules that have changed, so that the loop evicts what other changes concern
// meanwhile.
func (d *daemon) startReading(ctx context.Context) {
	if !d.rulesChanged || d.reading || time.Since(d.lastReading) < readingInterval {
		return
	}
	d.rulesChanged, d.reading, d.lastReading = false, true, time.Now()
	d.reader.Go(func() { d.rulesRead <- readRules(ctx, d.MarkMask) })
}
