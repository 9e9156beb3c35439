package cli

import (
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

func TestUnderlayServicesAndPublications(t *testing.T) {
	s := startOrchestrator(t)
	n1 := joinNode(t, s, "n1", &pilasterv1.RegisterRequest{})
	for _, name := range []string{"green", "lime"} {
		command(t, "tenant", "create", name, "--network", "nimitz", "--cidr", "fd12:3456::/48")
	}
	command(t, "tenant", "create", "blue")

	storage := strings.Fields(
		"underlay service create storage --tenant green --virtual fd09::7 --real 2001:db8::9")
	prints(t, "underlay service storage of tenant green created: containers reach 2001:db8::9 at fd09::7\n", storage...)
	web := strings.Fields("underlay publication create web --tenant green --container fd12:3456::5 --node n1")
	refused(t, ExitFailed, "node n1 has no gateway", web...)
	if _, err := n1.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Gateway: true})); err != nil {
		t.Fatal(err)
	}
	prints(t, "publication web of tenant green created: clients reach fd12:3456::5 at fd70:696c:6100:1:0:ff:0:2 "+
		"of node n1\n", web...)
	files := underlayServiceView{"lime", "files", "fd09::8", "2001:db8::9"}
	if v := ask[underlayServiceView](t, "underlay", "service", "create", "files", "--tenant", "lime", "--virtual",
		"fd09::8", "--real", "2001:db8::9"); v != files {
		t.Errorf("underlay service create: %+v, want %+v", v, files)
	}
	api := publicationView{"lime", "api", "fd12:3456::5", "n1", "fd70:696c:6100:1:0:ff:0:3"}
	if v := ask[publicationView](t, "underlay", "publication", "create", "api", "--tenant", "lime", "--container",
		"fd12:3456::5", "--node", "n1"); v != api {
		t.Errorf("underlay publication create: %+v, want %+v", v, api)
	}

	for _, c := range []struct {
		code       int
		says, args string
	}{
		{ExitUsage, `--real "192.0.2.9" is not an IPv6 address`,
			"underlay service create db --tenant green --virtual fd09::8 --real 192.0.2.9"},
		{ExitUsage, `--virtual "x" is not an IPv6 address`,
			"underlay service create db --tenant green --virtual x --real 2001:db8::a"},
		{ExitUsage, "required flag", "underlay service create db --tenant green --virtual fd09::8"},
		{ExitUsage, "own CIDR fd12:3456::/48, whose addresses are containers'; nothing was changed",
			"underlay service create db --tenant green --virtual fd12:3456::8 --real 2001:db8::a"},
		{ExitFailed, "an underlay service storage already", strings.Join(storage, " ")},
		{ExitFailed, "on network netpila",
			"underlay service create db --tenant blue --virtual fd09::8 --real 2001:db8::a"},
		{ExitFailed, `no tenant "red"`, "underlay service list --tenant red"},
		{ExitFailed, `no underlay service "db"`, "underlay service delete db --tenant green"},
		{ExitUsage, "required flag", "underlay service delete storage"},
		{ExitUsage, `--container "10.0.0.5" is not an IPv6 address`,
			"underlay publication create db --tenant green --container 10.0.0.5 --node n1"},
		{ExitUsage, "required flag", "underlay publication create db --tenant green --container fd12:3456::5"},
		{ExitUsage, "not in the tenant's CIDR",
			"underlay publication create db --tenant green --container fd12:3457::5 --node n1"},
		{ExitFailed, `no node "n2"`,
			"underlay publication create db --tenant green --container fd12:3456::5 --node n2"},
		{ExitFailed, "a publication web already", strings.Join(web, " ")},
		{ExitFailed, `no tenant "red"`, "underlay publication list --tenant red"},
		{ExitFailed, `no publication "web"`, "underlay publication delete web --tenant lime"},
		{ExitUsage, "required flag", "underlay publication delete web"},
		{ExitFailed, "publishes 2 containers, so the node was not deleted", "node delete n1"},
	} {
		refused(t, c.code, c.says, strings.Fields(c.args)...)
	}

	prints(t, "TENANT   NAME      VIRTUAL   REAL\n"+
		"green    storage   fd09::7   2001:db8::9\n"+
		"lime     files     fd09::8   2001:db8::9\n",
		"underlay", "service", "list")
	prints(t, "TENANT   NAME   CONTAINER      NODE   UNDERLAY\n"+
		"lime     api    fd12:3456::5   n1     fd70:696c:6100:1:0:ff:0:3\n",
		"underlay", "publication", "list", "--tenant", "lime")
	if v := ask[[]underlayServiceView](t, "underlay", "service", "list", "--tenant", "lime"); !slices.Equal(
		v,
		[]underlayServiceView{files},
	) {
		t.Errorf("underlay service list: %+v, want %+v", v, files)
	}
	if r := command(t, "node", "get", "n1"); !strings.Contains(r.stdout, "gateway      open\n") ||
		!ask[nodeView](t, "node", "get", "n1").Gateway {
		t.Errorf("node get: %s, want an open gateway", r.stdout)
	}
	if v := ask[[]publicationView](t, "underlay", "publication", "list"); len(v) != 2 || v[1] != api {
		t.Errorf("underlay publication list: %+v, want 2, the second %+v", v, api)
	}
	if r := command(t, "tenant", "get", "green"); !strings.Contains(
		r.stdout,
		"storage          fd09::7, real address 2001:db8::9\n",
	) ||
		!strings.Contains(r.stdout, "web              fd70:696c:6100:1:0:ff:0:2 on node n1, container fd12:3456::5\n") {
		t.Errorf("tenant get green: %s, want its service and its publication", r.stdout)
	}
	files.Tenant = ""
	lime := ask[tenantView](t, "tenant", "get", "lime")
	if !slices.Equal(lime.UnderlayServices, []underlayServiceView{files}) ||
		len(lime.Published) != 1 ||
		lime.Published[0].Name != "api" {
		t.Errorf("tenant get lime: %+v, want underlay service files and publication api", lime)
	}
	for line, says := range map[string]string{
		"underlay service delete --tenant green": "storage\n:", "underlay publication delete --tenant lime": "api\n:",
		"underlay service create db --tenant": "blue\ngreen\nlime\n", "underlay publication create db --node": "n1\n",
		"underlay service create db --real": ":", // and no names of files
	} {
		if r := command(t, append(append([]string{"__complete"}, strings.Fields(line)...), "")...); !strings.HasPrefix(
			r.stdout,
			says,
		) {
			t.Errorf("%s <TAB>: %q, want prefix %q", line, r.stdout, says)
		}
	}

	prints(t, "underlay service storage of tenant green deleted\n",
		"underlay", "service", "delete", "storage", "--tenant", "green")
	if v := ask[publicationView](t, "underlay", "publication", "delete", "web", "--tenant",
		"green"); v != (publicationView{Tenant: "green", Name: "web"}) {
		t.Errorf("underlay publication delete: %+v, want name and tenant of web", v)
	}
	command(t, "node", "delete", "n1", "--force")
	v := ask[[]underlayServiceView](t, "underlay", "service", "list")
	left := ask[[]publicationView](t, "underlay", "publication", "list")
	if len(v) != 1 || len(left) != 0 {
		t.Errorf("after the deletions: %+v and %+v, want one underlay service and no publication", v, left)
	}
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", "/nonexistent")
	refused(t, ExitUnreachable, "/nonexistent", "underlay", "service", "list")
	refused(t, ExitUnreachable, "/nonexistent", "underlay", "publication", "list")
}
