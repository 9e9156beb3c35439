package services_test

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/trace"
)

// trace runs pilaster lab trace from the client to the service, and calls meanwhile until it ends. It returns the
// trace, and its stages and verdict.
func (b *bed) trace(meanwhile func(), args ...string) (t trace.Trace, way string) {
	b.Helper()
	args = append([]string{"lab", "trace", "--lab", b.Name(), "-o", "json", "c1", b.to.Addr().String()}, args...)
	var out []byte
	var err error
	command, ended := exec.CommandContext(labtest.Context(b.T), labtest.Binary(b.T), args...), make(chan struct{})
	var says strings.Builder
	command.Stderr = &says
	go func() { defer close(ended); out, err = command.Output() }()
	for running := true; running; {
		if meanwhile != nil {
			meanwhile()
		} else {
			<-ended
		}
		select {
		case <-ended:
			running = false
		default:
		}
	}
	if _, ran := lab.ExitStatus(err); !ran {
		b.Fatalf("%v: %v", args, err)
	}
	if err := json.Unmarshal(out, &t); err != nil {
		b.Fatalf("%v: %v\n%s%s", args, err, out, &says)
	}
	var stages []string
	for _, s := range t.Steps {
		stages = append(stages, s.Node+" "+s.Stage)
		b.Logf("%s %s  %v → %v  %s  %s", s.Node, s.Stage, s.Source, s.Destination, s.Detail, s.Entry)
	}
	return t, strings.TrimSpace(strings.Join(stages, ", ") + ": " + t.Verdict + " " + t.Drop)
}

// TestTrace: a trace follows a packet to the service until it is delivered, whichever endpoint it gets, for packets on
// the packet path and for sockets that the endpoint is chosen for. The tables have the same way.
func TestTrace(t *testing.T) {
	b := newBed(t)
	b.create(&pilasterv1.Service{Name: "web"})
	b.settles("c1", web...)
	ways := map[string][2]string{ // live, and from the tables
		"w1": {"n1 container, n1 service, n1 deliver: delivered",
			"n1 container, n1 service, n1 endpoint, n1 policy, n1 policy, n1 deliver: delivered"},
		"w2": {"n1 container, n1 service, n1 translate, n2 uplink, n2 deliver: delivered",
			"n1 container, n1 service, n1 translate, n1 next hop, n1 policy, n2 uplink, n2 endpoint, n2 policy, " +
				"n2 translate, n2 deliver: delivered"},
	}
	ways["w3"] = [2]string{strings.ReplaceAll(ways["w2"][0], "n2", "n3"), strings.ReplaceAll(ways["w2"][1], "n2", "n3")}
	check := func(got trace.Trace, way, want string) string {
		t.Helper()
		name := strings.TrimPrefix(got.Destination.Name, b.Name()+"-")
		if way != want || got.Service != b.to.Addr().String() || got.Note != "" {
			t.Fatalf("to %s: %s; service %s; %q\nwant %s", name, way, got.Service, got.Note, want)
		}
		return name
	}
	seen := map[string]bool{}
	for i := 0; i < 60 && len(seen) < len(web); i++ {
		got, way := b.trace(nil, "tcp/80")
		name := strings.TrimPrefix(got.Destination.Name, b.Name()+"-")
		seen[check(got, way, ways[name][0])] = true
		if got.Answer == nil || got.Answer.Kind != "connected" {
			t.Errorf("to %s: answer %+v", name, got.Answer)
		}
	}
	if len(seen) < len(web) {
		t.Errorf("60 traces have led to %v only", seen)
	}
	for _, name := range web {
		c, err := b.Container(name)
		must(t, err)
		got, way := b.trace(nil, "tcp/80", "--dry-run", "--backend", c.Address.String())
		check(got, way, ways[name][1])
	}
	// A packet that is sent while the trace begins may be seen on the first node only.
	labtest.Until(t, patience, "a trace follows a packet of a process to its endpoint", func() bool {
		got, way := b.trace(func() { b.process("c1") }, "tcp/80", "--wait", "20s")
		name := strings.TrimPrefix(got.Destination.Name, b.Name()+"-")
		return way == strings.ReplaceAll(ways[name][0], "n1 service, ", "") && got.Service == b.to.Addr().String()
	})
	for to, want := range map[string]string{"tcp/81": "no-service", "icmpv6": "service-protocol"} {
		got, way := b.trace(nil, to, "--dry-run")
		if way != "n1 container, n1 service: dropped "+want || got.Note != "" {
			t.Errorf("%s: %s, %q; want %s", to, way, got.Note, want)
		}
	}
}
