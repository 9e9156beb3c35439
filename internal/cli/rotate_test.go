package cli

import (
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// rotate rotates the key of tenant blue. stream is the stream of node n1, which hosts the tenant.
func rotate(t *testing.T, stream *connect.BidiStreamForClient[pilasterv1.FollowRequest, pilasterv1.FollowResponse]) {
	t.Helper()
	says := func(sequence uint64, accepts, holds []uint32) {
		t.Helper()
		err := stream.Send(&pilasterv1.FollowRequest{HostedTenants: []string{"blue"}, Sequence: sequence,
			Hosting: []*pilasterv1.Hosting{{Tenant: "blue", Accepts: accepts, Holds: holds}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	says(1, []uint32{1}, []uint32{1})
	for v := ask[tenantView](t, "tenant", "get", "blue"); len(v.IDs[0].Lacking) > 0; v = ask[tenantView](t, "tenant",
		"get", "blue") {
	}
	refused(t, ExitFailed, "no tenant \"none\"", "tenant", "rotate-key", "none")
	done := make(chan tenantView)
	go func() {
		defer close(done) // also where ask fails
		done <- ask[tenantView](t, "tenant", "rotate-key", "blue", "--wait", "1m")
	}()
	for len(ask[tenantView](t, "tenant", "get", "blue").IDs) < 2 {
	}
	refused(
		t,
		ExitFailed,
		"id 3 of tenant blue is not yet accepted by n1",
		"tenant",
		"rotate-key",
		"blue",
		"--wait",
		"0s",
	)
	if r := command(t, "tenant", "get", "blue"); !strings.Contains(r.stdout, "3   accepted, not yet by n1\n") ||
		!strings.Contains(r.stdout, "1   current, held by n1\n") {
		t.Errorf("tenant get: %s, want id 1 current and id 3 not yet accepted", r.stdout)
	}
	says(2, []uint32{1, 3}, []uint32{1})
	says(3, []uint32{1, 3}, []uint32{1, 3})
	if v := <-done; len(v.IDs) != 2 || v.IDs[1].ID != 3 || v.IDs[1].State != "current" ||
		v.IDs[0].State != "retiring" ||
		v.IDs[0].HeldBy[0] != "n1" {
		t.Errorf("rotate-key: %+v, want id 3 current and id 1 retiring, held by n1", v)
	}
	says(4, []uint32{1, 3}, []uint32{3})
	if _, err := stream.Receive(); err != nil {
		t.Fatal(err)
	}
	for v := ask[tenantView](t, "tenant", "get", "blue", "--show-key"); len(v.IDs) != 1; v = ask[tenantView](t,
		"tenant", "get", "blue", "--show-key") {
		if len(v.IDs[0].Key) != 32 || v.IDs[0].Key == v.IDs[1].Key {
			t.Fatalf("tenant get --show-key: %+v, want two different keys of 32 digits", v)
		}
	}
	if r := command(t, "tenant", "rotate-key", "blue", "--wait", "0s", "--force"); r.code != ExitDone ||
		!strings.Contains(r.stdout, "4   current; not yet used for new containers by n1\n") {
		t.Errorf("rotate-key --force: %+v, want id 4 current, not yet used by n1", r)
	}
}

func TestTenantTextOfAnAppWithoutLabels(t *testing.T) {
	var out strings.Builder
	printTenant(&out, tenantView{Name: "blue", Apps: []appView{{ID: 2}}})
	if !strings.Contains(out.String(), "app\t2\twithout labels\n") {
		t.Errorf("%q, want app 2 without labels", out.String())
	}
}

func TestTenantTextOfUnenforcedPolicies(t *testing.T) {
	v := viewHosted(
		&pilasterv1.GetTenantResponse{
			Tenant:  &pilasterv1.Tenant{Name: "blue"},
			Hosting: []*pilasterv1.Hosting{{Node: "n1"}, {Node: "n2", Unenforced: "no room"}},
		},
	)
	var out strings.Builder
	if printTenant(&out, v); strings.Count(out.String(), "policies\t") != 1 ||
		!strings.Contains(
			out.String(),
			"policies\tn2\tdoes not enforce the current ones (it enforces the previous ones, or isolates the "+
				"containers): no room\n",
		) {
		t.Errorf("%q, want one line about the policies, of node n2", out.String())
	}
}
