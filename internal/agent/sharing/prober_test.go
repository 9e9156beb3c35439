package sharing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/tenant"
)

// backend is a node with offloads, and its packet path.
type backend struct {
	roles     []agent.Role
	changed   chan struct{}
	prober    *Prober
	lost      map[string][]string
	answering map[string][]string
	reported  time.Time

	sent     int
	silent   map[netip.Prefix]bool
	answered map[netip.Prefix]time.Time
	fail     error
}

func (b *backend) Roles() []agent.Role              { return b.roles }
func (b *backend) OffloadsChanged() <-chan struct{} { return b.changed }

func (b *backend) SetFrontends(name string, lost, answering []string) {
	if !slices.Equal(b.lost[name], lost) || !slices.Equal(b.answering[name], answering) {
		b.lost[name], b.answering[name], b.reported = lost, answering, time.Now()
	}
}

func (b *backend) Probe(p dpapi.Probe, frontend netip.Prefix) error {
	if p != (dpapi.Probe{Offload: 7, VNI: 5, Epoch: 9}) {
		return fmt.Errorf("probe of %+v", p)
	}
	b.sent++
	if b.fail == nil && !b.silent[frontend] {
		b.answered[frontend] = time.Now()
	}
	return b.fail
}

func (b *backend) ProbeAnswered(_ uint32, frontend netip.Prefix) (time.Duration, bool, error) {
	at, ok := b.answered[frontend]
	return time.Since(at), ok, nil
}

func node(n byte) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 1, 7: n}), 64)
}

func role(phase tenant.OffloadPhase, frontends ...tenant.Frontend) agent.Role {
	return agent.Role{Tenant: "green", TenantID: 5, Backend: true, Offload: tenant.Offload{
		ID: 7, Phase: phase, Epoch: 9, Frontends: frontends,
	}}
}

var (
	first  = tenant.Frontend{Node: "f1", Prefix: node(1)}
	second = tenant.Frontend{Node: "f2", Prefix: node(2)}
)

// TestProber (NZ6): three probes without an answer are a loss, which is reported at once, and an answer ends it.
// Without an offload nothing is sent.
func TestProber(t *testing.T) {
	run := func(name string, test func(t *testing.T, b *backend, after func(time.Duration, ...string))) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := &backend{
					changed: make(chan struct{}, 1),
					lost:    map[string][]string{}, answering: map[string][]string{},
					silent: map[netip.Prefix]bool{}, answered: map[netip.Prefix]time.Time{},
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				b.prober = NewProber(b, b, slog.New(slog.DiscardHandler))
				go b.prober.Run(ctx)
				synctest.Wait()
				test(t, b, func(d time.Duration, want ...string) {
					t.Helper()
					time.Sleep(d)
					synctest.Wait()
					if !slices.Equal(b.lost["green"], want) {
						t.Errorf("lost are %q, want %q", b.lost["green"], want)
					}
				})
			})
		})
	}
	begin := func(b *backend, roles ...agent.Role) {
		b.roles = roles
		b.changed <- struct{}{}
		synctest.Wait()
	}
	run("without a role", func(t *testing.T, b *backend, after func(time.Duration, ...string)) {
		after(time.Minute)
		front := role(tenant.OffloadActive, first)
		front.Backend = false
		begin(b, front)
		after(time.Minute)
		if b.sent > 0 {
			t.Errorf("%d probes without an offload of this node", b.sent)
		}
		begin(b, role(tenant.OffloadActive, first))
		after(time.Minute)
		if b.sent < 599 || b.sent > 601 {
			t.Errorf("%d probes in a minute, want 600", b.sent)
		}
		begin(b)
		sent := b.sent
		if after(time.Minute); b.sent != sent {
			t.Error("probes after the end of the offload")
		}
	})
	run("a frontend is cut off", func(t *testing.T, b *backend, after func(time.Duration, ...string)) {
		begin(b, role(tenant.OffloadActive, first, second))
		after(time.Minute)
		b.silent[node(2)] = true
		cut := time.Now()
		after(290 * time.Millisecond)
		after(400*time.Millisecond, "f2")
		if took := b.reported.Sub(cut); took <= 290*time.Millisecond || took > 410*time.Millisecond {
			t.Errorf("reported after %v, want 300 to 400 ms", took)
		}
		b.silent[node(1)] = true
		after(time.Second, "f1", "f2")
		clear(b.silent)
		after(210 * time.Millisecond)
	})
	answering := func(t *testing.T, b *backend, want ...string) {
		t.Helper()
		if !slices.Equal(b.answering["green"], want) {
			t.Errorf("answering are %q, want %q", b.answering["green"], want)
		}
	}
	run("who answers", func(t *testing.T, b *backend, after func(time.Duration, ...string)) {
		b.silent[node(1)], b.silent[node(2)] = true, true
		b.answered[node(1)] = time.Now().Add(-time.Millisecond) // of an agent before this one
		draining := second
		draining.Draining = true
		begin(b, role(tenant.OffloadPreparing, first, draining))
		after(500 * time.Millisecond)
		answering(t, b)
		clear(b.silent)
		after(25 * time.Millisecond) // a start waits for it
		answering(t, b, "f1", "f2")
		sent := b.sent
		if after(time.Minute); b.sent > sent+1300 {
			t.Errorf("%d probes in a minute to two that answer, want 1200", b.sent-sent)
		}
		b.silent[node(2)] = true
		after(150 * time.Millisecond)
		answering(t, b, "f1", "f2")
		after(time.Second, "f2")
		answering(t, b, "f1")
		clear(b.silent)
		after(210 * time.Millisecond)
		answering(t, b, "f1", "f2")
		begin(b, role(tenant.OffloadActive, first))
		answering(t, b, "f1")
		begin(b, role(tenant.OffloadActive, first, second)) // again
		answering(t, b, "f1")
		after(210 * time.Millisecond)
		answering(t, b, "f1", "f2")
		begin(b, role(tenant.OffloadEnding, first, second))
		answering(t, b)
	})
	run("many frontends", func(t *testing.T, b *backend, after func(time.Duration, ...string)) {
		all := make([]tenant.Frontend, 2*maxProbes)
		for i := range all {
			all[i] = tenant.Frontend{Node: fmt.Sprintf("f%04d", i), Prefix: netip.PrefixFrom(
				netip.AddrFrom16([16]byte{0xfd, 1, 6: byte(i >> 8), 7: byte(i)}), 64)}
		}
		begin(b, role(tenant.OffloadActive, all...))
		after(time.Minute)
		if len(b.answering["green"]) != len(all) || b.sent > 601*maxProbes {
			t.Errorf("%d of %d frontends answer %d probes", len(b.answering["green"]), len(all), b.sent)
		}
		last := all[len(all)-1]
		b.silent[last.Prefix] = true
		after(time.Second, last.Node)
		if p := b.prober.Problems(); len(p) != 1 || !strings.Contains(p[0], "after 600ms") {
			t.Errorf("problems %q", p)
		}
		begin(b, role(tenant.OffloadActive, all[maxProbes:]...))
		after(time.Second, last.Node)
		if p := b.prober.Problems(); len(p) > 0 {
			t.Errorf("not too many: %q", p)
		}
	})
	run("one lost probe", func(t *testing.T, b *backend, after func(time.Duration, ...string)) {
		begin(b, role(tenant.OffloadActive, first))
		for range 5 {
			b.silent[node(1)] = true
			after(200 * time.Millisecond)
			clear(b.silent)
			after(200 * time.Millisecond)
		}
	})
	run("no answer before the rules are loaded", func(t *testing.T, b *backend, after func(time.Duration, ...string)) {
		b.silent[node(1)], b.silent[node(2)] = true, true
		loading := second
		loading.Draining = true
		begin(b, role(tenant.OffloadPreparing, first, loading))
		after(time.Minute)
		begin(b, role(tenant.OffloadDual, first, loading))
		after(390 * time.Millisecond) // the probe before was sent too early
		after(time.Second, "f1")      // packets are sent to it
		delete(b.silent, node(2))
		after(time.Second, "f1")
		b.silent[node(2)] = true
		after(time.Second, "f1", "f2") // a reserve that answered before
		begin(b, role(tenant.OffloadEnding, first, loading))
		after(time.Second)
	})
	run("the agent did not run for a time", func(t *testing.T, b *backend, after func(time.Duration, ...string)) {
		begin(b, role(tenant.OffloadActive, first))
		after(time.Second)
		for at := range b.answered { // the last probe was answered long ago, and no other was sent
			b.answered[at] = b.answered[at].Add(-time.Minute)
		}
		after(210 * time.Millisecond)
	})
	run("probes that cannot be sent", func(t *testing.T, b *backend, after func(time.Duration, ...string)) {
		begin(b, role(tenant.OffloadActive, first))
		after(time.Second)
		b.fail = errors.New("no route")
		after(time.Second, "f1")
	})
}
