package cli

import (
	"reflect"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

func TestTenantsOfNetworkNimitz(t *testing.T) {
	s := startOrchestrator(t)
	prints(t, "tenant green created: id 1, network nimitz, 10.0.0.0/16 (a /24 each node), fd12:3456::/48 "+
		"(a /80 each node)\n",
		"tenant", "create", "green", "--network", "nimitz", "--cidr", "10.0.0.0/16", "--cidr", "fd12:3456::/48")
	lime := ask[tenantView](
		t,
		"tenant",
		"create",
		"lime",
		"--network",
		"nimitz",
		"--cidr",
		"10.0.0.0/16",
		"--no-node-cidrs",
	)
	if lime.Network != "nimitz" || lime.Addressing != "own" ||
		!reflect.DeepEqual(lime.Overlays, []overlayView{{CIDR: "10.0.0.0/16", Capacity: 65534}}) {
		t.Errorf("tenant create lime: %+v, want one CIDR of 65534 addresses", lime)
	}
	olive := ask[tenantView](
		t,
		"tenant",
		"create",
		"olive",
		"--network",
		"nimitz",
		"--cidr",
		"10.0.0.0/16,fd12:3456::/48",
		"--node-bits",
		"26,96",
	)
	if !reflect.DeepEqual(
		olive.Overlays,
		[]overlayView{{"10.0.0.0/16", 26, 0, 1024}, {"fd12:3456::/48", 96, 0, 1 << 32}},
	) {
		t.Errorf("tenant create olive: %+v, want CIDRs with /26 and /96 subnets", olive)
	}
	for _, c := range []struct {
		says string
		args string
	}{
		{"netpila, nimitz, ila or evpn", "--network vlan"},
		{"use clear", "--network ila --addressing encrypted"},
		{"--cidr", "--network ila --cidr fd12::/48"},
		{"needs --cidr, once, or once for each family", "--network nimitz"},
		{"--cidr", "--cidr 10.0.0.0/16"},
		{"--node-bits", "--node-bits 24"},
		{"--no-node-cidrs", "--no-node-cidrs"},
		{"--addressing is for --network netpila", "--network nimitz --cidr 10.0.0.0/16 --addressing clear"},
		{"not a prefix such as", "--network nimitz --cidr 10.0.0.0"},
		{"use either --node-bits or --no-node-cidrs",
			"--network nimitz --cidr 10.0.0.0/16 --node-bits 24 --no-node-cidrs"},
		{"1 --node-bits for 2 --cidr", "--network nimitz --cidr 10.0.0.0/16,fd12:3456::/48 --node-bits 24"},
		{"not the length of a subnet", "--network nimitz --cidr 10.0.0.0/16 --node-bits 33"},
		{"leave no room", "--network nimitz --cidr 10.0.0.0/24"},
		{"one family", "--network nimitz --cidr 10.0.0.0/16,10.1.0.0/16"},
		{"write 10.0.0.0/16", "--network nimitz --cidr 10.0.0.1/16"},
		{"base prefix", "--network nimitz --cidr fd70:696c:6100::/48"},
	} {
		refused(t, ExitUsage, c.says, append([]string{"tenant", "create", "red"}, strings.Fields(c.args)...)...)
	}
	refused(t, ExitFailed, "no key to rotate", "tenant", "rotate-key", "green")

	client := joinNode(t, s, "n1", &pilasterv1.RegisterRequest{})
	if _, err := client.Resolve(t.Context(),
		connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "green"})); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Allocate(t.Context(),
		connect.NewRequest(&pilasterv1.AllocateRequest{Tenant: "green"})); err != nil {
		t.Fatal(err)
	}
	// tenant create returns when its change is in the cache. So the earlier changes above are in the cache too.
	prints(t, "tenant blue created: id 4, encrypted\n", "tenant", "create", "blue")
	r := command(t, "tenant", "get", "green")
	for _, line := range []string{"network      nimitz\n", "addressing   own\n", "cidr         10.0.0.0/16      1 of " +
		"256 node subnets /24 allocated\n", "cidr         fd12:3456::/48   1 of 4294967296 node " +
		"subnets /80 allocated\n"} {
		if !strings.Contains(r.stdout, line) {
			t.Errorf("tenant get has no line %q:\n%s", line, r.stdout)
		}
	}
	if v := ask[tenantView](t, "tenant", "get", "green"); v.Overlays[0] != (overlayView{"10.0.0.0/16", 24, 1, 256}) {
		t.Errorf("tenant get: %+v, want 1 of 256 subnets allocated", v)
	}
	r = command(t, "tenant", "list")
	for _, words := range []string{"green   nimitz    own          10.0.0.0/16 (1/256), fd12:3456::/48 " +
		"(1/4294967296)    1 ", "lime    nimitz    own          10.0.0.0/16 (0/65534) ",
		"blue    netpila   encrypted    - "} {
		if !strings.Contains(r.stdout, words) {
			t.Errorf("tenant list has no %q:\n%s", words, r.stdout)
		}
	}
	if r := command(t, "__complete", "tenant", "create", "--network", ""); !strings.Contains(r.stdout, "nimitz") {
		t.Errorf("--network <TAB>: %q, want nimitz", r.stdout)
	}
}
