package suites

import (
	"errors"
	"fmt"
	"math"

	"pilaster.io/pilaster/internal/bench/progrun"
	"pilaster.io/pilaster/internal/bench/report"
)

// victimFlows is the number of measured flows while a container sprays. There are few, so that they rarely share a slot
// of the flow cache.
const victimFlows = 16

// roundsASpray multiplies the samples of a spray, because each sample has only a few packets.
const roundsASpray = 8

// noisePackets is the size of a burst to random addresses.
const noisePackets = 4096

// sprays measures flows while a sprayer sends between every two packets of a flow. A container can only use addresses
// of its own tenant. With these addresses and with flow labels, which select paths, it can fill slots of the flow
// cache.
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

// spray measures flows beside a sprayer that uses the given number of keys, or random addresses if keys is 0.
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
		return s, fmt.Errorf("%d packets were dropped; want %d, those to random addresses", after-before, wanted)
	}
	s.Alone, s.Beside, s.Own = report.Bootstrap(
		alone,
		m.Random,
	), report.Bootstrap(
		beside,
		m.Random,
	), report.Bootstrap(
		own,
		m.Random,
	)
	return s, nil
}

// neighbours returns packets of the sprayer, and the same number of packets to one peer, so that the CPU's caches are
// equally warm in both cases.
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

// paths is the number of paths of a pair: PATHS of bpf/net/netpila/flow.h.
const paths = 8
