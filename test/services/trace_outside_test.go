package services_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/trace"
)

// denyWeb lets no packet reach the web servers.
const denyWeb = `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "web"},
"spec": {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]}}`

// ports are the source ports of packets of the host outside, each used once.
type ports struct{ last uint16 }

func (p *ports) next() uint16 {
	p.last++
	return 10_000 + p.last
}

// traceOutside runs pilaster lab trace from the host outside. It returns the trace, with its stages and verdict.
func (b *bed) traceOutside(args ...string) (t trace.Trace, way string) {
	b.Helper()
	args = append([]string{"lab", "trace", "--lab", b.Name(), "-o", "json", internet}, args...)
	out, err := exec.CommandContext(labtest.Context(b.T), labtest.Binary(b.T), args...).Output()
	if _, ran := lab.ExitStatus(err); !ran {
		b.Fatalf("%v: %v", args, err)
	}
	if err := json.Unmarshal(out, &t); err != nil {
		b.Fatalf("%v: %v\n%s", args, err, out)
	}
	var stages []string
	for _, s := range t.Steps {
		stages = append(stages, s.Node+" "+s.Stage)
	}
	return t, strings.TrimSpace(strings.Join(stages, ", ") + ": " + t.Verdict + " " + t.Drop)
}

// connect connects from a port of the host outside. It returns the name of the endpoint, or "refused" or "silent".
func (b *bed) connect(to netip.AddrPort, from uint16) string {
	b.Helper()
	ns, err := b.Namespace(internet)
	must(b.T, err)
	defer ns.Close()
	var c net.Conn
	d := net.Dialer{Timeout: connectTime, LocalAddr: &net.TCPAddr{Port: int(from)}}
	err = ns.Do(func() (err error) { c, err = d.DialContext(b.Context(), "tcp6", to.String()); return err })
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, syscall.EHOSTUNREACH):
		return "silent"
	}
	must(b.T, err)
	defer c.Close()
	name := ""
	_, err = fmt.Fscanln(c, &name)
	must(b.T, err)
	return name
}

// drops returns how many packets a node has dropped for a reason, or for any if it is empty.
func (b *bed) drops(node, reason string) (n uint64) {
	b.Helper()
	all, err := b.Drops(b.Context(), node)
	must(b.T, err)
	for why, packets := range all {
		if reason == "" || why == reason {
			n += packets
		}
	}
	return n
}

// TestTraceOutside: for packets of a host outside, what a dry run predicts is what happens to real ones: the endpoint
// that a connection gets, or the node and the reason of the drop. A live trace shows the same.
func TestTraceOutside(t *testing.T) {
	spec := labSpec()
	spec.Nodes, spec.Outside = append(spec.Nodes, "n4", "n5"), []lab.OutsideHost{{Name: internet}}
	spec.Containers = append(spec.Containers,
		lab.Container{Name: "c4", Node: "n4", Tenant: shop, Labels: map[string]string{"app": "client"}})
	b := startBed(t, spec)
	external := netip.MustParseAddr("2001:db8:7::9")
	must(t, b.Route(external, "n1"))
	made := b.create(&pilasterv1.Service{Name: "web", ExternalIps: []string{external.String()}, NodePorts: true})
	b.to = netip.AddrPortFrom(external, servicePort)
	b.settles(internet, web...)
	var sources ports

	const in = "n1 uplink, n1 service, n1 maglev, "
	ways := map[string][2]string{"w1": {
		in + "n1 endpoint, n1 target, n1 policy, n1 session, n1 translate, n1 deliver, n1 answer: delivered",
		in + "n1 policy, n1 deliver: delivered",
	}}
	for name, node := range map[string]string{"w2": "n2", "w3": "n3"} {
		ways[name] = [2]string{
			strings.ReplaceAll(in+"n1 tunnel, N uplink, N source, N endpoint, N target, N policy, N session, "+
				"N translate, N deliver, N answer, n1 answer: delivered", "N", node),
			strings.ReplaceAll(in+"n1 tunnel, n1 uplink, N uplink, N policy, N deliver: delivered", "N", node),
		}
	}
	traceTo := func(args ...string) (name, way string, t trace.Trace) {
		t, way = b.traceOutside(append([]string{external.String(), "tcp/80"}, args...)...)
		return strings.TrimPrefix(t.Destination.Name, b.Name()+"-"), way, t
	}
	seen := map[string]bool{}
	for i := 0; i < 60 && len(seen) < len(web); i++ {
		from := sources.next()
		name, way, _ := traceTo("--dry-run", "--source-port", fmt.Sprint(from))
		if seen[name] {
			continue
		}
		seen[name] = true
		if way != ways[name][0] {
			t.Errorf("from port %d to %s: %s; want %s", from, name, way, ways[name][0])
		}
		if got := b.connect(b.to, from); got != name {
			t.Errorf("from port %d a connection got %s, and the dry run says %s", from, got, name)
		}
		name, way, live := traceTo("--source-port", fmt.Sprint(sources.next()))
		if way != ways[name][1] || live.Answer == nil || live.Answer.Kind != "connected" {
			t.Errorf("live to %s: %s, answer %+v; want %s", name, way, live.Answer, ways[name][1])
		}
	}
	if len(seen) < len(web) {
		t.Errorf("60 connections would get %v only", seen)
	}

	n5, err := b.Address("n5")
	must(t, err)
	for _, c := range []struct {
		name      string
		before    func()
		to        netip.AddrPort
		endpoint  string // that the connection gets; empty: none
		dry, live string // stages and verdict
		node      string // that drops the packet for the reason
		reason    string // empty: no program drops it
		real      string // what a connection gets
	}{
		{"a port that is not exposed", func() {}, netip.AddrPortFrom(external, 81), "",
			"n1 uplink, n1 service: dropped no-service", "n1 uplink, n1 drop: dropped no-service", "n1", "no-service",
			"refused"},
		{"denied by a policy", func() {
			_, err := b.Operator().ApplyPolicies(t.Context(), connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{
				Tenant: shop, Documents: []string{denyWeb},
			}))
			must(t, err)
		}, b.to, "w2",
			in + "n1 tunnel, n2 uplink, n2 source, n2 endpoint, n2 target, n2 policy: dropped policy-denied",
			in + "n1 tunnel, n1 uplink, n2 uplink, n2 policy: dropped policy-denied", "n2", "policy-denied", "silent"},
		{"at a node without an endpoint, with traffic policy Local", func() {
			must(t, b.Route(external, "n4"))
			made.TrafficPolicy = "Local"
			_, err := b.Operator().ApplyServices(t.Context(), connect.NewRequest(&pilasterv1.ApplyServicesRequest{
				Tenant: shop, Services: []*pilasterv1.Service{made},
			}))
			must(t, err)
		}, b.to, "", "n4 uplink, n4 service: dropped no-backend", "n4 uplink, n4 drop: dropped no-backend", "n4",
			"no-backend", "refused"},
		{"a node port at a node without the tenant", func() {},
			netip.AddrPortFrom(n5, uint16(made.Ports[0].NodePort)), "", "n5 uplink, n5 node: passed",
			"n5 uplink, n5 node: passed", "n5", "", "refused"},
		{"the address at a node without the tenant", func() { must(t, b.Route(external, "n5")) }, b.to, "",
			"n5 uplink, n5 node: passed", "n5 uplink, n5 node: passed", "n5", "", "silent"},
	} {
		c.before()
		to := []string{c.to.Addr().String(), fmt.Sprint("tcp/", c.to.Port())}
		var from uint16
		labtest.Until(t, patience, c.name+": a dry run says "+c.dry, func() bool {
			from = sources.next()
			dry, way := b.traceOutside(append(to, "--dry-run", "--source-port", fmt.Sprint(from))...)
			return way == c.dry && (c.endpoint == "" || dry.Destination.Name == b.Name()+"-"+c.endpoint) &&
				(dry.Verdict != trace.Passed || strings.Contains(dry.Note, "service web of tenant shop"))
		})
		before := b.drops(c.node, c.reason)
		if got := b.connect(c.to, from); got != c.real {
			t.Errorf("%s: a connection was %s, want %s", c.name, got, c.real)
		}
		if now := b.drops(c.node, c.reason); (now > before) != (c.reason != "") {
			t.Errorf("%s: %s has dropped %d packets for %s", c.name, c.node, now-before, c.reason)
		}
		if _, way := b.traceOutside(append(to, "--source-port", fmt.Sprint(from))...); way != c.live {
			t.Errorf("%s, live: %s; want %s", c.name, way, c.live)
		}
	}
}
