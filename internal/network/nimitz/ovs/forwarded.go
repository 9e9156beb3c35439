package ovs

import (
	"context"
	"fmt"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Forwarded returns how many packets our Open vSwitch has sent to other nodes by each of its entries, since the entry
// was added. It changes nothing.
func Forwarded(ctx context.Context, runDir string) (map[pipeline.Forward]uint64, error) {
	s := &Switch{config: Config{RunDir: runDir}}
	// The datapath counts packets of cached flows; a revalidation adds these figures to the tables.
	if _, err := s.control(ctx, "revalidator/wait"); err != nil {
		return nil, fmt.Errorf("open vswitch: %w; is it running with --ovs-run-dir %s?", err, runDir)
	}
	flows, err := s.flows(ctx, cookieOurs|uint64(forward)<<cookieKind, cookieMask|0xff<<cookieKind)
	if err != nil {
		return nil, err
	}
	all := map[pipeline.Forward]uint64{}
	for _, f := range flows {
		e, err := parse(f)
		if err != nil {
			return nil, fmt.Errorf("entries of Open vSwitch: %w", err)
		}
		if to, ok := e.(pipeline.Forward); ok && to.Port == pipeline.VXLAN {
			all[to] = f.Packets
		}
	}
	return all, nil
}
