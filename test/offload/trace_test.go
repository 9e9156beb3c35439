package offload_test

import (
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/trace"
)

// run runs the command, and decodes what it prints.
func (b *bed) run(into any, args ...string) (status int) {
	b.Helper()
	out, err := exec.CommandContext(b.ctx, labtest.Binary(b.T), append(args, "-o", "json")...).Output()
	status, ran := lab.ExitStatus(err)
	if err := json.Unmarshal(out, into); !ran || err != nil {
		b.Fatalf("%v: exit %d, %v\n%s", args, status, err, out)
	}
	return status
}

// TestTrace: a trace of an offloaded container shows the sender's choice, the rules at a frontend, and the decision at
// the backend. A frontend says which policies it decides by.
func TestTrace(t *testing.T) {
	b := newBed(t, 0)
	const beside = "beside"
	must(t, b.AddContainer(b.ctx, lab.Container{
		Name: beside, Node: "n1", Tenant: "green", Labels: map[string]string{"app": "client"},
	}))
	b.start("n2", "n3", "n4", "n5") // near is on a frontend, far is not
	b.await(pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE)
	const atBackend = ", n1 nsh, n1 forwarding, n1 policy"
	for _, c := range []struct{ from, protocol, want string }{
		{far, "tcp/80", "n6 container, n6 register, n6 forwarding, n6 encap, n2 decap, n2 policy, n2 policy, n2 nsh" +
			atBackend + ", n1 policy, n1 deliver: delivered"},
		{far, "tcp/81", "n6 container, n6 register, n6 forwarding, n6 encap, n2 decap, n2 policy, n2 policy, n2 nsh" +
			atBackend + ", n1 policy: dropped policy-denied"},
		{near, "tcp/80", "n2 container, n2 register, n2 forwarding, n2 policy, n2 policy, n2 nsh" +
			atBackend + ", n1 policy, n1 deliver: delivered"},
		{beside, "tcp/81", "n1 container, n1 register, n1 forwarding, n1 nsh, n2 decap, n2 policy, n2 policy, n2 nsh" +
			atBackend + ", n1 policy: dropped policy-denied"},
	} {
		var got trace.Trace
		status := b.run(&got, "lab", "trace", "--lab", b.Name(), c.from, hot, c.protocol)
		var stages []string
		for _, s := range got.Steps {
			stages = append(stages, s.Node+" "+s.Stage)
			t.Logf("%s %s  %s  %s", s.Node, s.Stage, s.Detail, s.Entry)
		}
		text := strings.TrimSpace(strings.Join(stages, ", ") + ": " + got.Verdict + " " + got.Drop)
		if text != c.want || got.Live || got.Note == "" || (status == 0) != (got.Verdict == trace.Delivered) {
			t.Errorf("%s %s: exit %d, live %v, %q\n%s\nwant\n%s", c.from, c.protocol, status, got.Live, got.Note, text,
				c.want)
		}
	}

	list, err := b.Operator().ListPolicies(b.ctx, connect.NewRequest(&pilasterv1.ListPoliciesRequest{Tenant: "green"}))
	must(t, err)
	newer := func(a, b *pilasterv1.Policy) int { return int(a.Revision - b.Revision) }
	applied := slices.MaxFunc(list.Msg.Policies, newer)
	source, err := b.Address(near)
	must(t, err)
	destination, err := b.Address(hot)
	must(t, err)
	var answer struct {
		Reasons  []struct{ Allowed bool }
		Frontend struct {
			Node, Backend string
			Revision      int64
		}
	}
	socket := b.AgentSocket("n2")
	b.run(&answer, "why", "--agent-socket", socket, source.String(), destination.String(), "tcp/80")
	if f := answer.Frontend; f.Node != "n2" || f.Backend != "n1" || f.Revision < applied.Revision {
		t.Errorf("decided at %+v, want frontend n2 with the policies of revision %d", f, applied.Revision)
	}
}
