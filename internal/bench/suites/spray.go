package suites

import (
	"errors"
	"fmt"
	"math"

	"pilaster.io/pilaster/internal/bench/progrun"
	"pilaster.io/pilaster/internal/bench/report"
)

// victimFlows are conversations that go on while another container sprays: few, so that they hardly ever share a
// slot themselves.
const victimFlows = 16

// roundsASpray is how often more: a sample is of a few packets only.
const roundsASpray = 8

// noisePackets is a burst to made-up addresses.
const noisePackets = 4096

// sprays lets a sprayer send between every two packets of a flow, and times the flows. A container is told only
// addresses of its own tenant; with them, and the flow labels that make paths of its own, it can fill slots.
func (m *scaleMeter) sprays(endpoints int) (all []SprayCost, err error) {
	h := &m.Bed.Hooks[0]
	flows, err := m.Bed.Peers(victimFlows, m.Bed.Endpoints, m.Random)
	if err != nil {
		return nil, err
	}
	established := make([]progrun.Frame, victimFlows)
	for i, p := range flows {
		established[i] = h.Frame(p, 0)
	}
	victim, err := progrun.NewFrames(h, established)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, victim.Close()) }()
	for _, keys := range append([]int{0}, m.Keys...) {
		s, err := m.spray(h, victim, keys)
		if err != nil {
			return nil, fmt.Errorf("a sprayer with %d keys: %w", keys, err)
		}
		s.Endpoints = endpoints
		all = append(all, s)
		m.step()
	}
	return all, nil
}

// spray is with a sprayer that has that many keys, or with 0 one that makes up addresses.
func (m *scaleMeter) spray(h *progrun.Hook, victim *progrun.Frames, keys int) (s SprayCost, err error) {
	burst, want := keys, uint32(progrun.Forwarded)
	if keys == 0 {
		burst, want = noisePackets, progrun.Dropped
	}
	sprayed, usual, err := m.neighbours(h, keys, burst)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, sprayed.Close(), usual.Close()) }()
	s = SprayCost{Keys: keys, Evicted: 1 - math.Pow(1-1.0/flowSlots, float64(keys))}
	before, err := m.Drops()
	if err != nil {
		return s, err
	}
	var alone, beside, own []float64
	for range m.Rounds * roundsASpray {
		if err := m.Context.Err(); err != nil {
			return s, err
		}
		for _, n := range []struct {
			sends       *progrun.Frames
			want        uint32
			took, flows *[]float64
		}{{usual, progrun.Forwarded, new([]float64), &alone}, {sprayed, want, &own, &beside}} {
			ns, err := n.sends.Time(burst, n.want)
			if err != nil {
				return s, err
			}
			*n.took = append(*n.took, ns)
			if ns, err = victim.Time(victimFlows, progrun.Forwarded); err != nil {
				return s, err
			}
			*n.flows = append(*n.flows, ns)
		}
	}
	after, err := m.Drops()
	if err != nil {
		return s, err
	}
	wanted := uint64(0)
	if keys == 0 {
		wanted = sprayed.Sent
	}
	if after-before != wanted {
		return s, fmt.Errorf("%d packets were dropped, and %d were sent to made-up addresses", after-before, wanted)
	}
	s.Alone, s.Beside, s.Own = report.Bootstrap(alone, m.Random), report.Bootstrap(beside, m.Random), report.Bootstrap(own, m.Random)
	return s, nil
}

// neighbours are packets of the sprayer, which is one container, and as many of a container that talks with one peer: so the programs
// are equally warm in the CPU's caches.
func (m *scaleMeter) neighbours(h *progrun.Hook, keys, burst int) (sprayed, usual *progrun.Frames, err error) {
	peers, err := m.Bed.Peers(max(1, (keys+paths-1)/paths), m.Bed.Endpoints[:1], m.Random)
	if err != nil {
		return nil, nil, err
	}
	many, one := make([]progrun.Frame, burst), make([]progrun.Frame, burst)
	for i := range burst {
		one[i] = h.Frame(peers[0], 0)
		if keys == 0 {
			many[i] = h.Noise(m.Bed.Endpoints[0], m.Random)
		} else {
			many[i] = h.Frame(peers[i/paths], uint32(i%paths))
		}
	}
	if sprayed, err = progrun.NewFrames(h, many); err != nil {
		return nil, nil, err
	}
	if usual, err = progrun.NewFrames(h, one); err != nil {
		return nil, nil, errors.Join(err, sprayed.Close())
	}
	return sprayed, usual, nil
}

// paths is how many a pair has: PATHS of bpf/net/netpila/flow.h.
const paths = 8
