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
