package cli

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator"
)

func TestEgress(t *testing.T) {
	s := startOrchestrator(t)
	n1 := joinNode(t, s, "n1", &pilasterv1.RegisterRequest{})
	command(t, "tenant", "create", "blue")
	command(t, "tenant", "create", "green", "--network", "nimitz", "--cidr", "fd12:3456::/48")

	prints(t, "egress of tenant blue to 2001:db8:9::/48: allow\negress of tenant blue to 2001:db8:8::/48: allow\n",
		"egress", "set", "blue", "--to", "2001:db8:9::/48,2001:db8:8::/48", "--action", "allow")
	all := []string{"egress", "set", "blue", "--to", "::/0", "--action", "allow", "--via", "n1"}
	refused(t, ExitFailed, "node n1 cannot be an egress gateway", all...)
	if _, err := n1.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Egress: true})); err != nil {
		t.Fatal(err)
	}
	const address = "fd70:696c:6100:1:0:ff:100:10"
	prints(t, "egress of tenant blue to ::/0: allow via n1 ("+address+")\n", all...)
	denied := []egressView{{Tenant: "blue", To: "2001:db8:8::/48", Action: "deny"}}
	if v := ask[[]egressView](t, "egress", "set", "blue", "--to", "2001:db8:8::/48", "--action",
		"deny"); !reflect.DeepEqual(v, denied) {
		t.Errorf("egress set: %+v, want %+v", v, denied)
	}
	for _, c := range []struct {
		code       int
		says, args string
	}{
		{ExitUsage, "required flag", "egress set blue --action allow"},
		{ExitUsage, "required flag", "egress set blue --to ::/0"},
		{ExitUsage, `--action "drop": use allow or deny`, "egress set blue --to ::/0 --action drop"},
		{ExitUsage, `--to "10.0.0.0/8" is not an IPv6 prefix`, "egress set blue --to 10.0.0.0/8 --action allow"},
		{ExitUsage, "--via is empty", "egress set blue --to ::/0 --action allow --via="},
		{ExitUsage, "--via has an empty name", "egress set blue --to ::/0 --action allow --via n1,"},
		{ExitUsage, "write fd70:696c:6100:2::/64 for its node", "tenant set blue --nodes fd70:696c:6100:2::1"},
		{ExitUsage, "neither allow, deny nor a prefix", "tenant set blue --nodes n2"},
		{ExitUsage, "--via is for --action allow", "egress set blue --to ::/0 --action deny --via n1"},
		{ExitUsage, "2 --address for 1 --via", "egress set blue --to ::/0 --action allow --via n1 --address " +
			"2001:db8::1,2001:db8::2"},
		{ExitUsage, `--address "x" is not an IPv6 address`, "egress set blue --to ::/0 --action allow --via n1 " +
			"--address x"},
		{ExitUsage, "write 2001:db8:7::/48", "egress set blue --to 2001:db8:7::1/48 --action allow"},
		{ExitUsage, "would have no effect", "egress set blue --to fe80::/10 --action allow"},
		{ExitFailed, "on network nimitz", "egress set green --to ::/0 --action allow"},
		{ExitFailed, `no tenant "red"`, "egress list red"},
		{ExitFailed, "no egress rule to 2001:db8:7::/48", "egress delete blue --to 2001:db8:7::/48"},
		{ExitUsage, "required flag", "egress delete blue"},
		{ExitUsage, `PREFIX "x" is not an IPv6 prefix`, "egress protect add x"},
		{ExitUsage, "is always protected, as a part of fe80::/10", "egress protect add fe80::/64"},
		{ExitFailed, "2001:db8:5::/48 is not protected", "egress protect remove 2001:db8:5::/48"},
		{ExitUsage, "--nodes: use allow, deny, or prefixes", "tenant set blue --nodes allow,fd70:696c:6100:1::/64"},
		{ExitUsage, "2001:db8::/48 has no nodes", "tenant set blue --nodes 2001:db8::/48"},
		{ExitUsage, "required flag", "tenant set blue"},
		{ExitFailed, "on network nimitz", "tenant set green --nodes allow"},
		{ExitFailed, "gateway of 1 egress rule, so it was not deleted: blue to ::/0. Set", "node delete n1"},
	} {
		refused(t, c.code, c.says, strings.Fields(c.args)...)
	}
	prints(t, "TENANT   TO                ACTION   GATEWAYS\n"+
		"blue     ::/0              allow    n1 ("+address+")\n"+
		"blue     2001:db8:8::/48   deny     -\n"+
		"blue     2001:db8:9::/48   allow    -\n",
		"egress", "list")
	via := egressView{"blue", "::/0", "allow", []egressGatewayView{{"n1", address}}}
	if v := ask[[]egressView](t, "egress", "list", "blue"); len(v) != 3 || !reflect.DeepEqual(v[0], via) {
		t.Errorf("egress list: %+v, want 3, the first %+v", v, via)
	}
	if r := command(t, "egress", "list", "green"); strings.Contains(r.stdout, "green") {
		t.Errorf("egress list green: %s", r.stdout)
	}

	prints(t, "2001:db8:5::/48, 2001:db8:6::/48: protected\n", "egress", "protect", "add", "2001:db8:5::/48",
		"2001:db8:6::/48")
	prints(t, "2001:db8:6::/48: no longer protected\n", "egress", "protect", "remove", "2001:db8:6::/48")
	if r := command(t, "egress", "protect", "list"); !strings.Contains(r.stdout, "2001:db8:5::/48       by an") ||
		!strings.Contains(r.stdout, "fd70:696c:6100::/40   always\n") || strings.Contains(r.stdout, "2001:db8:6::") {
		t.Errorf("egress protect list: %s", r.stdout)
	}
	if v := ask[protectedView](t, "egress", "protect", "list"); len(v.Prefixes) != 1 || len(v.Always) < 10 {
		t.Errorf("egress protect list: %+v", v)
	}

	prints(t, "tenant blue: its containers and nodes in fd70:696c:6100::/40 reach each other\n",
		"tenant", "set", "blue", "--nodes", "allow")
	r := command(t, "tenant", "get", "blue")
	for _, line := range []string{
		"egress       ::/0              allow via n1 (" + address + ")\n",
		"reaches      nodes in fd70:696c:6100::/40\n",
	} {
		if !strings.Contains(r.stdout, line) {
			t.Errorf("tenant get blue: %swant %s", r.stdout, line)
		}
	}
	if v := ask[tenantView](t, "tenant", "get", "blue"); len(v.Egress) != 3 || len(v.Reaches) != 1 {
		t.Errorf("tenant get blue: %+v", v)
	}
	prints(t, "tenant blue: its containers reach no node\n", "tenant", "set", "blue", "--nodes", "deny")
	if r := command(t, "node", "get", "n1"); !strings.Contains(r.stdout, "possible, also as a gateway\n") ||
		!ask[nodeView](t, "node", "get", "n1").Egress {
		t.Errorf("node get: %s, want egress", r.stdout)
	}
	if r := command(t, "node", "get", "n1"); !strings.Contains(r.stdout, "gateway of   tenant blue at "+address+"\n") {
		t.Errorf("node get: %s, want the tenant with its address", r.stdout)
	}
	if v := ask[nodeView](t, "node", "get", "n1"); !reflect.DeepEqual(v.GatewayOf, []gatewayRole{{"blue", address}}) {
		t.Errorf("node get: %+v, want the tenant with its address", v.GatewayOf)
	}
	for line, says := range map[string]string{
		"egress delete --to ::/0": "blue\ngreen\n:", "egress set blue --via": "n1\n:",
		"egress set blue --action":          "allow\ndeny\n:",
		"egress delete blue --to":           "::/0\n2001:db8:8::/48\n2001:db8:9::/48\n:",
		"egress delete blue --to ::/0 --to": "2001:db8:8::/48\n2001:db8:9::/48\n:",
		"egress list":                       "blue\ngreen\n:", "egress protect remove": "2001:db8:5::/48\n:",
		"tenant set --nodes deny": "blue\ngreen\n:",
		"tenant set blue --nodes": "allow\ndeny\n:", "egress set blue --to": ":", "egress protect add": ":",
	} {
		if r := command(t, append(append([]string{"__complete"}, strings.Fields(line)...), "")...); !strings.HasPrefix(
			r.stdout,
			says,
		) {
			t.Errorf("%s <TAB>: %q, want prefix %q", line, r.stdout, says)
		}
	}

	prints(t, "egress of tenant blue to 2001:db8:8::/48, 2001:db8:9::/48: rules deleted\n", "egress", "delete", "blue",
		"--to", "2001:db8:8::/48,2001:db8:9::/48")
	prints(t, "node n1 deleted\nThese egress rules had no other gateway, and deny now: blue to ::/0\n",
		"node", "delete", "n1", "--force")
	if v := ask[[]egressView](t, "egress", "list"); !reflect.DeepEqual(v, []egressView{{"blue", "::/0", "deny", nil}}) {
		t.Errorf("without the gateway: %+v, want one rule that denies", v)
	}
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", "/nonexistent")
	refused(t, ExitUnreachable, "/nonexistent", "egress", "list")
}

// With an egress prefix, the fabric must have another route to each node, and gateways have addresses there.
func TestEgressPrefix(t *testing.T) {
	s := startOrchestrator(t, func(c *orchestrator.Config) {
		c.Plan.Egress = netip.MustParsePrefix("2001:db8:7::/48")
	})
	joinNode(t, s, "n1", &pilasterv1.RegisterRequest{UplinkAddresses: []string{"2001:db8:70:1::2"}, Egress: true})
	routes := "fd70:696c:6100:1::/64 via 2001:db8:70:1::2, 2001:db8:7:1::/64 via 2001:db8:70:1::2\n"
	for _, args := range [][]string{{"node", "list"}, {"node", "get", "n1"}} {
		if r := command(t, args...); !strings.Contains(r.stdout, routes) {
			t.Errorf("%v: %s, want %s", args, r.stdout, routes)
		}
	}
	if n := ask[[]nodeView](t, "node", "list"); len(n) != 1 || n[0].EgressRoute == "" {
		t.Errorf("node list: %+v", n)
	}
	command(t, "tenant", "create", "blue")
	prints(t, "egress of tenant blue to ::/0: allow via n1 (2001:db8:7:1:0:ff:100:10)\n",
		"egress", "set", "blue", "--to", "::/0", "--action", "allow", "--via", "n1")
}
