package ramp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/tenant"
)

// Options configure a ramp.
type Options struct {
	Frontends int           // 1, 2, 4 or 8
	CIDRs     int           // random ones in the policies, in each direction
	Rate      float64       // connections per second at the end of the ramp
	Duration  time.Duration // of the ramp
	Every     time.Duration // between samples
	Binary    string        // of the lab's daemons
	Name      string        // of the lab
	Progress  func(what string)
}

// Smoke takes some 20 seconds.
func Smoke() Options {
	return Options{Frontends: 1, CIDRs: 100, Rate: 200, Duration: 6 * time.Second, Every: 500 * time.Millisecond}
}

// Quick takes a minute.
func Quick() Options {
	return Options{Frontends: 4, CIDRs: 20_000, Rate: 1500, Duration: 25 * time.Second, Every: 500 * time.Millisecond}
}

// Full takes five minutes.
func Full() Options {
	return Options{Frontends: 4, CIDRs: 50_000, Rate: 2000, Duration: 2 * time.Minute, Every: time.Second}
}

// threshold is the part of the budget at which the offload starts, as the controller's (docs/explanation).
const threshold = 0.7

// calibration measures the load of a constant rate, so that the budget fits the ramp.
const calibration = 3 * time.Second

// turns is how often calibration and ramp are repeated at most. A connection takes longer on a busy machine, so the
// load may reach a budget that was measured beside other work late or never. Later than at latest of the ramp, the
// offload is not started, because it would be active for a few samples or none.
const (
	turns  = 3
	latest = 5. / 6
)

const (
	backendNode = "backend"
	clientNode  = "clients"
	tenantName  = "green"
	server      = "server"
	client      = "client"
	downTime    = time.Minute
)

func frontendNode(i int) string { return fmt.Sprint("frontend", i+1) }

// spec is the lab: the backend with a server, its frontends, and a node with the clients.
func (o Options) spec() lab.Spec {
	s := lab.Spec{
		Name: o.Name, Nodes: []string{backendNode}, MTUReserve: tenant.OffloadOverhead,
		Tenants: []lab.Tenant{{
			Name: tenantName, Network: tenant.Nimitz, CIDRs: []netip.Prefix{netip.MustParsePrefix("fd12::/48")},
		}},
		Containers: []lab.Container{
			{Name: server, Node: backendNode, Tenant: tenantName, Labels: map[string]string{"app": server}},
			{Name: client, Node: clientNode, Tenant: tenantName, Labels: map[string]string{"app": client}},
		},
	}
	for i := range o.Frontends {
		s.Nodes = append(s.Nodes, frontendNode(i))
	}
	s.Nodes = append(s.Nodes, clientNode)
	return s
}

// run is a run of the benchmark.
type run struct {
	Options
	lab     *lab.Lab
	traffic *traffic
	meter   *meter
	report  *Report
}

// Run brings a lab up, and measures.
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	started := time.Now()
	r := &run{Options: o, report: &Report{
		Nature: nature, CIDRs: o.CIDRs, Frontends: o.Frontends, Rate: o.Rate, Threshold: threshold,
	}}
	o.Progress("start the lab")
	if r.lab, err = lab.Up(ctx, o.spec(), lab.Options{Binary: o.Binary}); err != nil {
		return nil, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTime)
		defer cancel()
		err = errors.Join(err, r.lab.Down(ctx))
	}()
	o.Progress("load the rules")
	if err := r.applyPolicies(ctx); err != nil {
		return nil, fmt.Errorf("policies: %w", err)
	}
	if r.traffic, err = startTraffic(ctx, r.lab); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.traffic.stop()) }()
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return nil, fmt.Errorf("turn on run-time statistics of programs: %w", err)
	}
	defer stats.Close()
	if r.meter, err = newMeter(r.lab, o.spec().Nodes); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.meter.Close()) }()
	for r.report.Turns < turns && r.report.Started == 0 {
		r.report.Turns++
		o.Progress("calibrate")
		if err := r.calibrate(ctx); err != nil {
			return nil, err
		}
		o.Progress("ramp")
		if err := r.ramp(ctx); err != nil {
			return nil, err
		}
	}
	r.report.Header = report.NewHeader(started)
	return r.report, r.report.complete()
}

// applyPolicies lets the client reach the server, and has random CIDRs in both directions, among which each connection
// is looked up.
func (r *run) applyPolicies(ctx context.Context) error {
	const many = 500 // CIDRs of a policy, whose document is at most 64 KiB long
	random := rand.New(rand.NewPCG(1, 1))
	documents := []string{fmt.Sprintf(`{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
		"metadata": {"name": "client"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
		"ingress": [{"from": [{"ipBlock": {"cidr": "%[1]s"}}]}],
		"egress": [{"to": [{"ipBlock": {"cidr": "%[1]s"}}]}]}}`,
		"fd12::/64")}
	for left := r.CIDRs; left > 0; left -= many {
		var blocks []string
		for range min(many, left) {
			a := netip.MustParseAddr("fd12::").As16()
			binary.BigEndian.PutUint64(a[6:], random.Uint64())
			binary.BigEndian.PutUint16(a[14:], uint16(random.Uint32()))
			p, _ := netip.AddrFrom16(a).Prefix(100 + random.IntN(29))
			blocks = append(blocks, fmt.Sprintf(`{"ipBlock": {"cidr": "%v"}}`, p))
		}
		all := strings.Join(blocks, ", ")
		documents = append(documents, fmt.Sprintf(`{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
			"metadata": {"name": "more-%d"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
			"ingress": [{"from": [%s]}], "egress": [{"to": [%[2]s]}]}}`, left, all))
	}
	revision := int64(0)
	for _, d := range documents {
		if _, err := r.lab.Operator().ApplyPolicies(ctx, connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{
			Tenant: tenantName, Documents: []string{d},
		})); err != nil {
			return err
		}
	}
	all := &pilasterv1.ListPoliciesRequest{Tenant: tenantName}
	list, err := r.lab.Operator().ListPolicies(ctx, connect.NewRequest(all))
	if err != nil {
		return err
	}
	for _, p := range list.Msg.Policies {
		revision = max(revision, p.Revision)
	}
	return r.until(ctx, "the backend has the policies", func() (bool, error) {
		status, err := r.lab.Agent(backendNode).Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
		return err == nil && status.Msg.GetOrchestrator().GetRevision() >= revision, err
	})
}

// until asks every 20 ms, for a minute.
func (r *run) until(ctx context.Context, what string, is func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for again := time.Tick(20 * time.Millisecond); ; {
		if done, err := is(); err != nil || done {
			return err
		}
		select {
		case <-again:
		case <-ctx.Done():
			return fmt.Errorf("%w while waiting until %s", ctx.Err(), what)
		}
	}
}

// calibrate chooses the budget: the threshold is to be reached in the middle of the ramp.
func (r *run) calibrate(ctx context.Context) error {
	rate := r.Rate / 2
	ended := r.traffic.open(ctx, calibration, func(time.Duration) float64 { return rate })
	if _, err := r.meter.load(); err != nil {
		return err
	}
	if err := <-ended; err != nil {
		return err
	}
	load, err := r.meter.load()
	if err != nil {
		return err
	}
	if r.report.Budget = load[backendNode] / threshold; r.report.Budget <= 0 {
		return errors.New("the backend's programs did not run")
	}
	return nil
}

// ramp opens connections at a growing rate, and samples.
func (r *run) ramp(ctx context.Context) error {
	r.report.Samples = nil // those of a turn without the offload
	rate := func(at time.Duration) float64 { return r.Rate * at.Seconds() / r.Duration.Seconds() }
	if _, err := r.meter.load(); err != nil {
		return err
	}
	begun, ticks := time.Now(), time.NewTicker(r.Every)
	defer ticks.Stop()
	ended, opened := r.traffic.open(ctx, r.Duration, rate), r.traffic.counts()
	for {
		select {
		case err := <-ended:
			return err
		case <-ticks.C:
		}
		load, err := r.meter.load()
		if err != nil {
			return err
		}
		at, now := time.Since(begun), r.traffic.counts()
		s := Sample{
			Seconds: at.Seconds(), Opened: now.opened - opened.opened, Failed: now.failed - opened.failed, Load: load,
		}
		r.report.Failed += s.Failed
		opened = now
		if s.Phase, err = r.phase(ctx); err != nil {
			return err
		}
		r.report.Samples = append(r.report.Samples, s)
		if load[backendNode] < threshold*r.report.Budget || r.report.Started > 0 ||
			at.Seconds() > latest*r.Duration.Seconds() {
			continue
		}
		if err := r.startOffload(ctx); err != nil {
			return err
		}
		r.report.Started = at.Seconds()
	}
}

func (r *run) startOffload(ctx context.Context) error {
	start := &pilasterv1.StartOffloadRequest{Tenant: tenantName, Node: backendNode, Force: true}
	for i := range r.Frontends {
		start.Frontends = append(start.Frontends, frontendNode(i))
	}
	_, err := r.lab.Operator().StartOffload(ctx, connect.NewRequest(start))
	return err
}

// phase returns the offload's phase, empty if there is none.
func (r *run) phase(ctx context.Context) (string, error) {
	list, err := r.lab.Operator().ListOffloads(ctx, connect.NewRequest(&pilasterv1.ListOffloadsRequest{}))
	if err != nil || len(list.Msg.Offloads) == 0 {
		return "", err
	}
	return string(tenant.OffloadPhases[list.Msg.Offloads[0].Offload.Phase]), nil
}
