package demo

import (
	"context"
	"fmt"
	"time"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/packet"
)

// beside has the round-trip time between containers, and between their nodes.
type beside struct{ containers, nodes time.Duration }

const (
	idle   = 20 * time.Millisecond // pause before a first packet, so that CPUs and timers are idle
	bursts = 30                    // of later packets, each of ten
)

// Wide limits, so that only a datapath that waits for a timer or a process exceeds them, on any machine.
const (
	slowestFirst = 20 * time.Millisecond
	slowestLater = 3.0 // times node to node
)

// firstPackets measures the first echo between each two containers of a tenant on different nodes, and an echo between
// their nodes after the same pause.
func (p *proof) firstPackets(ctx context.Context) (beside, error) {
	var containers, nodes []time.Duration
	for i, a := range p.lab.Containers() {
		for _, b := range p.lab.Containers()[i+1:] {
			if a.Tenant != b.Tenant || a.Node == b.Node {
				continue
			}
			// The first echo resolves the fabric's neighbours and does not count.
			if _, err := p.echo(ctx, a.Node, b.Node); err != nil {
				return beside{}, err
			}
			for _, m := range []struct {
				from, to string
				times    *[]time.Duration
			}{{a.Node, b.Node, &nodes}, {a.Name, b.Name, &containers}} {
				select {
				case <-ctx.Done():
					return beside{}, context.Cause(ctx)
				case <-time.After(idle):
				}
				rtt, err := p.echo(ctx, m.from, m.to)
				if err != nil {
					return beside{}, err
				}
				*m.times = append(*m.times, rtt)
			}
		}
	}
	return beside{lab.Median(containers), lab.Median(nodes)}, nil
}

func (p *proof) echo(ctx context.Context, from, to string) (time.Duration, error) {
	e, err := p.lab.Ping(ctx, from, to, packet.PingOptions{})
	if err != nil {
		return 0, err
	}
	if !e.Reached() {
		return 0, fmt.Errorf("%s does not reach %s", from, to)
	}
	return time.Duration(*e.RTTUs * float64(time.Microsecond)), nil
}

// speed prints the times of first and later packets. It measures bursts between containers and between nodes in turn,
// so that the load of the machine is the same for both.
func (p *proof) speed(ctx context.Context, first beside) error {
	var containers, nodes []time.Duration
	for range bursts {
		for _, m := range []struct {
			from, to string
			times    *[]time.Duration
		}{{"b1", "b3", &containers}, {"n1", "n3", &nodes}} {
			r, err := p.burst(ctx, m.from, m.to)
			if err != nil {
				return err
			}
			*m.times = append(*m.times, r...)
		}
	}
	later := beside{lab.Median(containers), lab.Median(nodes)}
	p.check(first.containers < slowestFirst, "3: the first packet took %v", first.containers)
	p.check(float64(later.containers) < slowestLater*float64(later.nodes),
		"3: later packets took %v, node to node %v", later.containers, later.nodes)
	p.print("%-46sfirst packet %s    later %s", "3  Speed (round trip)", first, later)
	return nil
}

// burst returns the times of ten echoes, after one that does not count.
func (p *proof) burst(ctx context.Context, from, to string) ([]time.Duration, error) {
	ns, err := p.lab.Namespace(from)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	address, err := p.lab.Address(to)
	if err != nil {
		return nil, err
	}
	r, err := packet.Ping(ctx, ns, address, packet.PingOptions{Count: 11})
	if err != nil {
		return nil, err
	}
	if !p.check(r.Received == r.Sent, "3: %s → %s: %d of %d answered", from, to, r.Received, r.Sent) && len(r.RTT) < 2 {
		return nil, fmt.Errorf("%s does not reach %s", from, to)
	}
	return r.RTT[1:], nil
}

func (b beside) String() string {
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
	return fmt.Sprintf("%.0f µs (node to node %.0f µs)", us(b.containers), us(b.nodes))
}
