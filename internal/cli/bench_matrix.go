package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/network/nimitz/ovs"
	"pilaster.io/pilaster/internal/nic"
)

// recordMatrix writes the traffic matrix of the model's rehearsal, or of the packets that an Open vSwitch sends within
// a time. If it fails, it leaves no file.
func recordMatrix(ctx context.Context, env Env, file, runDir string, within time.Duration, seed uint64) error {
	to, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s exists already and was not changed: name a new file", file)
	}
	if err != nil {
		return usage("--record: %w", err)
	}
	m := nic.Rehearse(seed)
	if runDir != "" {
		m, err = watchMatrix(ctx, env, runDir, within)
	}
	if err == nil {
		err = m.Write(to)
	}
	if err = errors.Join(err, to.Close()); err != nil {
		return errors.Join(err, os.Remove(file))
	}
	_, err = fmt.Fprintf(
		env.Stdout,
		"%s in %s: %s\n",
		humanize.Of(len(m.Destinations), "destination", "destinations"),
		file,
		m.Source,
	)
	return err
}

// watchMatrix returns the matrix of packets to other nodes, from the switch's own counters.
func watchMatrix(ctx context.Context, env Env, runDir string, within time.Duration) (m nic.Matrix, err error) {
	before, err := ovs.Forwarded(ctx, runDir)
	if err != nil {
		return m, err
	}
	fmt.Fprintf(
		env.Stderr,
		"counting for %v the packets that %s to other nodes\n",
		within,
		humanize.Of(len(before), "entry sends", "entries send"),
	)
	began := time.Now()
	select {
	case <-ctx.Done():
		return m, fmt.Errorf("interrupted: %w; no file was written", context.Cause(ctx))
	case <-time.After(within):
	}
	after, err := ovs.Forwarded(ctx, runDir)
	if err != nil {
		return m, err
	}
	m.Source = fmt.Sprintf("the Open vSwitch of %s, %v from %s", runDir, within, began.UTC().Format(time.RFC3339))
	for e, n := range after {
		m.Destinations = append(
			m.Destinations,
			nic.Destination{Megaflow: nic.Megaflow{VNI: e.VNI, To: e.To}, Packets: sentSince(n, before[e])},
		)
	}
	m.Sort()
	if len(m.Destinations) == 0 {
		return m, fmt.Errorf(
			"no packet was sent to other nodes in %v; no file was written: record while the job runs, or longer with "+
				"--for",
			within,
		)
	}
	return m, nil
}

// sentSince returns the difference of two readings of a counter, or the later reading if the entry was installed again
// in between.
func sentSince(now, before uint64) uint64 {
	if now < before {
		return now
	}
	return now - before
}

// readMatrix reads the matrix that a flag names.
func readMatrix(flag, file string) (m nic.Matrix, err error) {
	f, err := os.Open(file)
	if err != nil {
		return m, usage("--%s: %w", flag, err)
	}
	defer f.Close()
	if m, err = nic.ReadMatrix(f); err != nil {
		return m, usage("--%s %s: %w", flag, file, err)
	}
	return m, nil
}
