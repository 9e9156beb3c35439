package demo

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// internet is the host outside of the cluster.
const internet = "internet"

// pollTime is the time between two attempts.
const pollTime = 20 * time.Millisecond

// outside lets b1 reach a host outside of the cluster with one rule. The host sees an egress address of b1's node, and
// cannot reach it. Without the rule, nothing leaves b1.
func (p *proof) outside(ctx context.Context) error {
	rule := lab.EgressRule{To: netip.MustParsePrefix("::/0"), Action: lab.AllowEgress}
	blue, err := p.lab.Container("b1")
	if err != nil {
		return err
	}
	host, err := p.lab.Address(internet)
	if err != nil {
		return err
	}
	closed, err := p.lab.Ping(ctx, blue.Name, internet, packet.PingOptions{})
	if err != nil {
		return err
	}
	p.check(!closed.Reached() && closed.Sent == 0, "6: without a rule, %d of %d echoes of b1 are answered",
		closed.Received, closed.Sent)
	ctx, cancel := context.WithTimeout(ctx, waitTime)
	defer cancel()
	if err := p.lab.SetEgress(ctx, blue.Tenant, rule); err != nil {
		return err
	}
	seen, echo, err := p.whoReaches(ctx, blue.Name, host)
	if err != nil {
		return err
	}
	node, err := p.lab.Prefix(blue.Node)
	if err != nil {
		return err
	}
	p.check(tenant.IsEgressAddress(seen) && node.Contains(seen), "6: the host sees b1 as %v", seen)
	back, err := p.pingAddress(ctx, internet, seen)
	if err != nil {
		return err
	}
	p.check(back.Received == 0, "6: the host reaches %v", seen)
	other, err := p.lab.Ping(ctx, "r1", internet, packet.PingOptions{})
	if err != nil {
		return err
	}
	p.check(!other.Reached(), "6: red has no rule, and r1 reaches the host")

	p.print("%-46s%s is %v", "6  The outside", internet, host)
	p.print("   %-43s%d packets left b1: there is no route", "before", closed.Sent)
	p.print("   %-43s%s", "pilaster egress set blue --to ::/0", "--action allow")
	p.print("   %-43s%.0f µs; the host sees %v", "b1 → internet", *echo.RTTUs, seen)
	p.print("   %-43s%d of %d answered: from outside, only answers enter", "internet → "+short(seen.String()),
		back.Received, back.Sent)
	if err := p.lab.DeleteEgress(ctx, blue.Tenant, rule.To); err != nil {
		return err
	}
	for ; ; time.Sleep(pollTime) {
		if e, err := p.lab.Ping(ctx, blue.Name, internet, packet.PingOptions{}); err != nil || e.Sent == 0 {
			return err
		}
	}
}

// whoReaches pings a host until it answers, and returns as whom it sees the container.
func (p *proof) whoReaches(ctx context.Context, container string, host netip.Addr) (netip.Addr, lab.Echo, error) {
	outside, err := p.lab.Namespace(internet)
	if err != nil {
		return netip.Addr{}, lab.Echo{}, err
	}
	defer outside.Close()
	capture, err := packet.NewCapture(outside, lab.Uplink, packet.IncomingOnly)
	if err != nil {
		return netip.Addr{}, lab.Echo{}, err
	}
	defer capture.Close()
	sentinel := packet.NewSentinel()
	for {
		echo, err := p.lab.Ping(ctx, container, internet, packet.PingOptions{Count: 5, Payload: sentinel[:]})
		if err != nil {
			return netip.Addr{}, echo, err
		}
		if !echo.Reached() {
			time.Sleep(pollTime)
			continue
		}
		all, err := capture.Until(ctx, sentinel.In)
		if err != nil {
			return netip.Addr{}, echo, fmt.Errorf("%v answers %s and sees nothing: %w", host, container, err)
		}
		got, err := all[len(all)-1].Packet()
		return got.Source, echo, err
	}
}

// pingAddress sends echoes that must not be answered.
func (p *proof) pingAddress(ctx context.Context, from string, to netip.Addr) (packet.PingResult, error) {
	ns, err := p.lab.Namespace(from)
	if err != nil {
		return packet.PingResult{}, err
	}
	defer ns.Close()
	return packet.Ping(ctx, ns, to, packet.PingOptions{Count: 3, Timeout: 200 * time.Millisecond})
}
