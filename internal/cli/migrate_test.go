package cli

import (
	"path/filepath"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

func TestTenantMigrate(t *testing.T) {
	s := startOrchestrator(t)
	client := joinNode(t, s, "n1", &pilasterv1.RegisterRequest{})
	command(t, "tenant", "create", "green", "--network", "nimitz", "--cidr", "10.0.0.0/16")
	stream := client.Follow(t.Context())
	sequence := uint64(0)
	says := func(m *pilasterv1.Moving) {
		t.Helper()
		sequence++
		err := stream.Send(&pilasterv1.FollowRequest{HostedTenants: []string{"green"}, Sequence: sequence,
			Hosting: []*pilasterv1.Hosting{{Tenant: "green", Accepts: []uint32{1}, Holds: []uint32{1}, Moving: m}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	says(nil)
	for v := ask[tenantView](t, "tenant", "get", "green"); len(v.Nodes) == 0; v = ask[tenantView](t, "tenant", "get",
		"green") {
	}

	for says, args := range map[string]string{
		"use --to evpn, netpila or nimitz, or": "",
		"or --finish after":                    "--to netpila --finish",
		"can migrate only to evpn, netpila or nimitz; not to ila\n  from netpila: a move needs": "--to ila",
		"--addressing is for":      "--finish --addressing clear",
		"and --force for --finish": "--to netpila --force",
		"use encrypted or clear":   "--to netpila --addressing own",
	} {
		refused(t, ExitUsage, says, append([]string{"tenant", "migrate", "green"}, strings.Fields(args)...)...)
	}
	refused(
		t,
		ExitFailed,
		"begin with `pilaster tenant migrate green --to netpila or evpn`",
		"tenant",
		"migrate",
		"green",
		"--finish",
	)
	refused(t, ExitFailed, `no tenant "none"`, "tenant", "migrate", "none", "--to", "netpila")
	refused(
		t,
		ExitUnreachable,
		"",
		"tenant",
		"migrate",
		"green",
		"--to",
		"netpila",
		"--orchestrator-socket",
		filepath.Join(t.TempDir(), "none"),
	)

	refused(
		t,
		ExitFailed,
		"not all nodes have completed the step: n1 (has not confirmed)",
		"tenant",
		"migrate",
		"green",
		"--to",
		"netpila",
		"--addressing",
		"clear",
		"--wait",
		"0s",
	)
	refused(
		t,
		ExitFailed,
		"n1 (has not confirmed); nothing was changed",
		"tenant",
		"migrate",
		"green",
		"--finish",
	)
	says(&pilasterv1.Moving{Endpoints: 3, Moved: 2, Problem: "endpoint 7: it has a route"})
	for v := ask[tenantView](t, "tenant", "get", "green"); v.Leaving.Moved != 2; v = ask[tenantView](t, "tenant", "get",
		"green") {
	}
	r := command(t, "tenant", "get", "green")
	for _, words := range []string{
		"leaving nimitz 2 of 3 endpoints have addresses of network netpila too", "not yet n1 (2 of 3 endpoints: " +
			"endpoint 7: it has a route)", "addressing clear", "cidr 10.0.0.0/16",
	} {
		if !strings.Contains(strings.Join(strings.Fields(r.stdout), " "), words) {
			t.Errorf("tenant get has no %q:\n%s", words, r.stdout)
		}
	}
	if r := command(t, "tenant", "list"); !strings.Contains(r.stdout, "netpila (leaves nimitz, 2/3)   clear") {
		t.Errorf("tenant list:\n%swant netpila (leaves nimitz, 2/3)", r.stdout)
	}

	done := make(chan result)
	go func() { done <- command(t, "tenant", "migrate", "green", "--to", "netpila", "--wait", "1m") }()
	says(&pilasterv1.Moving{Endpoints: 3, Moved: 3})
	if r := <-done; r.code != ExitDone ||
		!strings.HasPrefix(r.stdout, "tenant green: 3 of 3 endpoints have addresses of network netpila too\n") ||
		!strings.Contains(r.stdout, "pilaster tenant migrate green --finish\nthat removes its IPv4 addresses") {
		t.Errorf("migrate --to netpila: %+v, want 3 of 3 endpoints and the next command", r)
	}
	refused(
		t,
		ExitFailed,
		"not all nodes have completed the step: n1 (3 endpoints left)",
		"tenant",
		"migrate",
		"green",
		"--finish",
		"--wait",
		"0s",
	)
	go func() { done <- command(t, "tenant", "migrate", "green", "--finish", "--wait", "1m", "-o", "json") }()
	says(nil)
	if r := <-done; r.code != ExitDone || strings.Contains(r.stdout, "leaving") ||
		strings.Contains(r.stdout, "overlays") {
		t.Errorf("migrate --finish: %+v, want no leaving and no overlays", r)
	}
	prints(t, "tenant green is on network netpila already and is not migrating; nothing was changed\n",
		"tenant", "migrate", "green", "--finish")
	for flag, want := range map[string]string{"--to": "netpila", "--addressing": "clear"} {
		if r := command(t, "__complete", "tenant", "migrate", flag, ""); !strings.Contains(r.stdout, want) {
			t.Errorf("%s <TAB>: %q, want %s", flag, r.stdout, want)
		}
	}
	if r := command(t, "__complete", "tenant", "migrate", ""); !strings.Contains(r.stdout, "green") {
		t.Errorf("migrate <TAB>: %q, want green", r.stdout)
	}
}

// TestTenantSwitch: between networks with the same addresses, one command does the two parts of the first step, each
// after the nodes have reported the one before.
func TestTenantSwitch(t *testing.T) {
	s := startOrchestrator(t)
	client := joinNode(t, s, "n1", &pilasterv1.RegisterRequest{Enforces: []string{"evpn", "nimitz"}})
	command(t, "tenant", "create", "green", "--network", "nimitz", "--cidr", "10.0.0.0/16")
	stream := client.Follow(t.Context())
	sequence := uint64(0)
	says := func(m *pilasterv1.Moving) {
		t.Helper()
		sequence++
		err := stream.Send(&pilasterv1.FollowRequest{HostedTenants: []string{"green"}, Sequence: sequence,
			Hosting: []*pilasterv1.Hosting{{Tenant: "green", Accepts: []uint32{1}, Holds: []uint32{1}, Moving: m}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	says(nil)
	for v := ask[tenantView](t, "tenant", "get", "green"); len(v.Nodes) == 0; v = ask[tenantView](t, "tenant", "get",
		"green") {
	}
	await := func(network, other string) {
		t.Helper()
		for v := ask[tenantView](t, "tenant", "get", "green"); v.Network != network || v.Leaving.Network != other; v =
			ask[tenantView](t, "tenant", "get", "green") {
		}
	}
	refused(t, ExitFailed, "not all nodes have completed the step: n1 (has not confirmed)", "tenant", "migrate",
		"green", "--to", "evpn", "--wait", "0s")
	if r := command(t, "tenant", "list"); !strings.Contains(r.stdout, "nimitz (joins evpn, 0/0, 1 node has not") {
		t.Errorf("tenant list:\n%s", r.stdout)
	}
	done := make(chan result)
	go func() { done <- command(t, "tenant", "migrate", "green", "--to", "evpn", "--wait", "1m") }()
	says(&pilasterv1.Moving{Endpoints: 3, Moved: 3, Changes: 2})
	await("evpn", "nimitz")
	says(&pilasterv1.Moving{Endpoints: 3, Moved: 3, Changes: 3})
	if r := <-done; r.code != ExitDone || r.stdout != "tenant green: 3 of 3 endpoints send by network evpn, and still "+
		"receive by network nimitz too\nto remove it from network nimitz, run: pilaster tenant migrate green "+
		"--finish\n" {
		t.Errorf("migrate --to evpn: %+v", r)
	}
	go func() { done <- command(t, "tenant", "migrate", "green", "--finish", "--wait", "1m") }()
	await("evpn", "")
	says(nil)
	if r := <-done; r.code != ExitDone || r.stdout != "tenant green is only on network evpn\n" {
		t.Errorf("migrate --finish: %+v", r)
	}
}

// TestMigrationWithoutReports: the output says how many nodes have not reported, because it does not count their
// endpoints.
func TestMigrationWithoutReports(t *testing.T) {
	moving := &pilasterv1.Tenant{Name: "green", Network: "netpila", Leaving: "nimitz"}
	reported := &pilasterv1.Hosting{
		Node:      "n1",
		Tenant:    "green",
		Connected: true,
		Moving:    &pilasterv1.Moving{Endpoints: 1, Moved: 1},
	}
	quiet := func(node string) *pilasterv1.Hosting {
		return &pilasterv1.Hosting{Node: node, Tenant: "green", Connected: true}
	}
	for want, hosting := range map[string][]*pilasterv1.Hosting{
		"1 of 1 endpoints have addresses of network netpila too":                            {reported},
		"1 of 1 endpoints have addresses of network netpila too, 1 node has not reported":   {reported, quiet("n2")},
		"0 of 0 endpoints have addresses of network netpila too, 2 nodes have not reported": {quiet("n1"), quiet("n2")},
	} {
		if got := viewLeaving(moving, hosting).describe("netpila"); got != want {
			t.Errorf("describe: %q, want %q", got, want)
		}
	}
	v := tenantView{Network: "netpila", Leaving: viewLeaving(moving, []*pilasterv1.Hosting{reported, quiet("n2")})}
	if got := v.network(); got != "netpila (leaves nimitz, 1/1, 1 node has not reported)" {
		t.Errorf("tenant list shows %q, want one node that has not reported", got)
	}
}
