package demo

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/packet"
)

// undecryptable is the drop reason for another tenant's ciphertext, which does not decrypt to a valid address.
const undecryptable = "dst-undecryptable"

// reach prints which containers reach each other. A missing reply alone does not prove that the sender's node dropped
// the packet, so each node's drop counters must rise by exactly the number of packets sent to other tenants.
func (p *proof) reach(ctx context.Context) error {
	before, err := p.drops(ctx)
	if err != nil {
		return err
	}
	echoes, err := p.lab.PingAll(ctx, packet.PingOptions{Count: 2, Timeout: 300 * time.Millisecond})
	if err != nil {
		return err
	}
	sent, total := map[string]uint64{}, uint64(0) // across tenants, by node
	right := 0
	cell := map[string]string{}
	for _, e := range echoes {
		must, err := p.lab.MustReach(e.From, e.To)
		if err != nil {
			return err
		}
		from, err := p.lab.Container(e.From)
		if err != nil {
			return err
		}
		cell[e.From+" "+e.To] = "drop"
		ok := e.Received == 0 && e.Sent == 2
		if must {
			ok = e.Received == 2
		} else {
			sent[from.Node] += uint64(e.Sent)
			total += uint64(e.Sent)
		}
		if e.Received > 0 {
			cell[e.From+" "+e.To] = "ok"
		}
		if p.check(ok, "1: %s → %s: %d of %d answered, must reach: %v", e.From, e.To, e.Received, e.Sent, must) {
			right++
		}
	}
	rise, err := p.dropsSince(ctx, before, total)
	if err != nil {
		return err
	}
	dropped := uint64(0)
	for _, node := range spec.Nodes {
		dropped += rise[node][undecryptable]
		want := map[string]uint64{}
		if sent[node] > 0 {
			want[undecryptable] = sent[node]
		}
		p.check(maps.Equal(rise[node], want), "1: drops on %s rose by %v, want %v", node, rise[node], want)
	}
	p.printMatrix(cell)
	p.print("%-46s%d of %d as expected; %d packets across tenants, %d dropped as %s",
		"", right, len(echoes), total, dropped, undecryptable)
	return nil
}

func (p *proof) printMatrix(cell map[string]string) {
	containers := p.lab.Containers()
	row := func(cells func(lab.ContainerStatus) string) string {
		var b strings.Builder
		for _, c := range containers {
			fmt.Fprintf(&b, "%-6s", cells(c))
		}
		return b.String()
	}
	p.print("%-42sto  %s", "1  Reachability", row(func(c lab.ContainerStatus) string { return c.Name }))
	for i, from := range containers {
		remark := ""
		if i == 0 {
			remark = "  same node b1→b2, across nodes b1→b3"
		}
		cells := row(func(to lab.ContainerStatus) string {
			if to.Name == from.Name {
				return "–"
			}
			return cell[from.Name+" "+to.Name]
		})
		p.print("%-46s%s", fmt.Sprintf("   from %s (%s, %s)", from.Name, from.Tenant, from.Node), cells+remark)
	}
}
