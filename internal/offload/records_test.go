package offload

import (
	"fmt"
	"strings"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// text formats frontends as "f1 f2-", where "-" marks one that is draining.
func text(all []tenant.Frontend) string {
	var names []string
	for _, f := range all {
		name := f.Node
		if f.Draining {
			name += "-"
		}
		names = append(names, name)
	}
	return strings.Join(names, " ")
}

func frontends(names string) (all []tenant.Frontend) {
	for _, name := range strings.Fields(names) {
		name, draining := strings.CutSuffix(name, "-")
		all = append(all, tenant.Frontend{Node: name, Draining: draining})
	}
	return all
}

func TestLeave(t *testing.T) {
	for _, c := range []struct {
		phase                   tenant.OffloadPhase
		frontends, leaves, want string
	}{
		{tenant.OffloadActive, "f1 f2 f3 f4", "f3", "active f1 f2 f4-"},
		{tenant.OffloadActive, "f1 f2 f3-", "f3", "active f1 f2"},
		{tenant.OffloadActive, "f1 f2-", "f1", "ending f2-"},
		{tenant.OffloadDual, "f1", "f1", "ending"},
		{tenant.OffloadPreparing, "f1- f2-", "f1", "preparing f2-"},
		{tenant.OffloadPreparing, "f1-", "f1", "ending"},
	} {
		was := frontends(c.frontends)
		left, phase := Leave(tenant.Offload{Phase: c.phase, Frontends: was}, c.leaves)
		if got := strings.TrimSpace(fmt.Sprint(phase, " ", text(left))); got != c.want {
			t.Errorf("%s %s without %s: %q, want %q", c.phase, c.frontends, c.leaves, got, c.want)
		}
		if text(was) != c.frontends {
			t.Errorf("%s became %s", c.frontends, text(was))
		}
	}
}

// TestAwaited: "8" is the last acknowledged change; "?" is a disconnected node, "!" one that does not enforce the
// policies. n1 is the backend, and the frontend after "+" answers it.
func TestAwaited(t *testing.T) {
	for _, c := range []struct{ is, reports, want string }{
		{"preparing f1- f2-", "n1=7 f1=7", "n1: has not confirmed, needed"},
		{"preparing f1- f2-", "n1=8! f1=7", ""}, // without room for its rules
		{"preparing f1 f2", "n1=8 f1=8! f2=8?", "f1: does not enforce the policies: no room, needed; " +
			"f2: is not connected, needed"},
		{"preparing f1 f2-", "n1=8+f1 f1=8 f2=7 n9=7", ""},
		{"preparing f1 f2", "n1=8+f2 f1=8 f2=8", "f1: has not answered the backend's probes, needed"},
		{"preparing f1", "n1=8", "f1: has left the cluster, needed"},
		{"preparing f1", "n1=8 f1", "f1: does not have the tenant yet, needed"},
		{"dual f1", "n1=8! f1=8 n8=7 n9=7?", "n8: has not confirmed"},
		{"dual f1", "n1=7 f1=8", "n1: has not confirmed, needed"},
		{"active f1", "n1=7 f1=7", ""},
		{"returning f1", "n1=8! f1=7 n9=7", "n1: does not enforce the policies: no room, needed"},
		{"returning f1", "n1=8? f1=7", "n1: is not connected, needed"},
		{"returning f1", "n1 f1=7", ""}, // its last container is gone
		{"ending f1", "n1=8 f1=8! n8=7 n9=7?", "n8: has not confirmed; n9: is not connected"},
		{"ending f1", "n1=8 f1=8 n9=8?", ""},
	} {
		phase, names, _ := strings.Cut(c.is, " ")
		r := &Record{Tenant: "red", Offload: tenant.Offload{
			Node: "n1", Since: 8, Phase: tenant.OffloadPhase(phase), Frontends: frontends(names),
		}}
		var nodes []Node
		for _, report := range strings.Fields(c.reports) {
			name, state, hosts := strings.Cut(report, "=")
			n := Node{Name: name, Connected: !strings.Contains(state, "?"), Tenants: map[string]Hosted{}}
			if hosts {
				h := Hosted{}
				fmt.Sscan(state, &h.Applied)
				if _, answering, is := strings.Cut(state, "+"); is {
					h.Answering = []string{answering}
				}
				if strings.Contains(state, "!") {
					h.Unenforced = "no room"
				}
				n.Tenants["red"] = h
			}
			nodes = append(nodes, n)
		}
		var got []string
		for _, a := range Awaited(r, nodes) {
			needed := ""
			if a.Needed {
				needed = ", needed"
			}
			got = append(got, a.Node+": "+a.Reason+needed)
		}
		if strings.Join(got, "; ") != c.want {
			t.Errorf("%s with %s: got %q, want %q", c.is, c.reports, got, c.want)
		}
	}
}

func TestRecordOf(t *testing.T) {
	r, err := RecordOf("red", &pilasterv1.Offload{
		Id: 1, Node: "n1", Prefix: "fd00::/64", Phase: pilasterv1.OffloadPhase_OFFLOAD_PHASE_PREPARING, Epoch: 1,
		Frontends: []*pilasterv1.Frontend{
			{Node: "f1", Prefix: "fd00:0:0:1::/64", Draining: true},
			{Node: "f2", Prefix: "fd00:0:0:2::/64", Draining: true},
			{Node: "f3", Prefix: "fd00:0:0:3::/64", Draining: true},
		},
		Endpoints: []*pilasterv1.OffloadedEndpoint{{App: 1, Addresses: [][]byte{{10, 0, 0, 1}}}}, Automatic: true,
	})
	if err != nil || r.Key() != (Key{"red", "n1"}) || !r.Automatic || len(r.Frontends) != 3 || r.Endpoints != nil {
		t.Errorf("%+v, %v", r, err)
	}
	if got := r.want(); got != 2 { // an earlier build's
		t.Errorf("it wants %d frontends, not 2", got)
	}
	if _, err := RecordOf("red", &pilasterv1.Offload{Id: 1, Prefix: "fd00::/64"}); err == nil {
		t.Error("a record without phase is accepted")
	}
}

// TestLateRegistration: a node that registers again without offloads leaves them.
func TestLateRegistration(t *testing.T) {
	w, k := small(t, 5, 0.2)
	w.offload(k, 4, tenant.OffloadActive)
	w.node("f1").Offloads = false
	w.only(w.run(200*time.Millisecond, 50*time.Millisecond), Drain, Activate)
	w.wantActive(k, "f2", "f3", "f4", "f5")
	w.node("be").Offloads = false
	if last := w.only(w.step(50*time.Millisecond), Stop); last.Phase != tenant.OffloadEnding {
		t.Errorf("%+v", last)
	}
}

// TestRoomOfTheBackend: a backend that has no room for its rules is a reason to offload, not to wait.
func TestRoomOfTheBackend(t *testing.T) {
	w, k := small(t, 5, 0.2)
	h := w.node("be").Tenants["red"]
	h.Unenforced = "no room"
	w.node("be").Tenants["red"] = h
	w.offload(k, 4, tenant.OffloadActive)
}

// TestUnknownRoom: nodes that report no loads can become frontends.
func TestUnknownRoom(t *testing.T) {
	w, k := small(t, 5, 0.2)
	for i := range 5 {
		w.node(fmt.Sprint("f", i+1)).Rules = Table{}
	}
	if _, err := w.c.Choose(w.now, w.in, k, 4); err != nil {
		t.Error(err)
	}
	w.node("f1").Unfit = "the Edge Switch"
	w.node("f2").Unfit = "the Edge Switch"
	if _, err := w.c.Choose(w.now, w.in, k, 4); err == nil || !strings.Contains(err.Error(), "2 the Edge Switch") {
		t.Error(err)
	}
}
