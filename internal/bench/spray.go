package bench

import (
	"errors"
	"fmt"
	"math"
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
	h := &m.bed.hooks[0]
	flows, err := m.bed.peers(victimFlows, m.bed.endpoints, m.random)
	if err != nil {
		return nil, err
	}
	established := make([]frame, victimFlows)
	for i, p := range flows {
		established[i] = h.frame(p, 0)
	}
	victim, err := newFrames(h, established)
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
func (m *scaleMeter) spray(h *scaleHook, victim *frames, keys int) (s SprayCost, err error) {
	burst, want := keys, uint32(forwarded)
	if keys == 0 {
		burst, want = noisePackets, dropped
	}
	sprayed, usual, err := m.neighbours(h, keys, burst)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, sprayed.Close(), usual.Close()) }()
	s = SprayCost{Keys: keys, Evicted: 1 - math.Pow(1-1.0/flowSlots, float64(keys))}
	before, err := m.drops()
	if err != nil {
		return s, err
	}
	var alone, beside, own []float64
	for range m.Rounds * roundsASpray {
		if err := m.ctx.Err(); err != nil {
			return s, err
		}
		for _, n := range []struct {
			sends       *frames
			want        uint32
			took, flows *[]float64
		}{{usual, forwarded, new([]float64), &alone}, {sprayed, want, &own, &beside}} {
			ns, err := n.sends.program(burst, n.want)
			if err != nil {
				return s, err
			}
			*n.took = append(*n.took, ns)
			if ns, err = victim.program(victimFlows, forwarded); err != nil {
				return s, err
			}
			*n.flows = append(*n.flows, ns)
		}
	}
	after, err := m.drops()
	if err != nil {
		return s, err
	}
	wanted := uint64(0)
	if keys == 0 {
		wanted = sprayed.handed
	}
	if after-before != wanted {
		return s, fmt.Errorf("%d packets were dropped, and %d were sent to made-up addresses", after-before, wanted)
	}
	s.Alone, s.Beside, s.Own = bootstrap(alone, m.random), bootstrap(beside, m.random), bootstrap(own, m.random)
	return s, nil
}

// neighbours are packets of the sprayer, which is one container, and as many of a container that talks with one peer: so the programs
// are equally warm in the CPU's caches.
func (m *scaleMeter) neighbours(h *scaleHook, keys, burst int) (sprayed, usual *frames, err error) {
	peers, err := m.bed.peers(max(1, (keys+paths-1)/paths), m.bed.endpoints[:1], m.random)
	if err != nil {
		return nil, nil, err
	}
	many, one := make([]frame, burst), make([]frame, burst)
	for i := range burst {
		one[i] = h.frame(peers[0], 0)
		if keys == 0 {
			many[i] = h.noise(m.bed.endpoints[0], m.random)
		} else {
			many[i] = h.frame(peers[i/paths], uint32(i%paths))
		}
	}
	if sprayed, err = newFrames(h, many); err != nil {
		return nil, nil, err
	}
	if usual, err = newFrames(h, one); err != nil {
		return nil, nil, errors.Join(err, sprayed.Close())
	}
	return sprayed, usual, nil
}

// paths is how many a pair has: PATHS of bpf/net/netpila/flow.h.
const paths = 8
