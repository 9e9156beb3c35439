package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const webPolicy = `# of the shop
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: web
  namespace: shop
spec:
  podSelector:
    matchLabels: {app: web}
  ingress:
  - from: [{podSelector: {}}]
`

const basePolicy = `apiVersion: policy.networking.k8s.io/v1alpha2
kind: ClusterNetworkPolicy
metadata:
  name: base
  annotations: {pilaster.io/audit: "true"}
spec: {tier: Baseline, priority: 1, subject: {namespaces: {}}}
`

func TestPolicyCommands(t *testing.T) {
	startOrchestrator(t)
	command(t, "tenant", "create", "blue")
	command(t, "tenant", "create", "red")
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	web, base := file("web.yaml", webPolicy), file("base.yaml", basePolicy)

	const dry = "networkpolicy/shop/web created (dry run)\nclusternetworkpolicy/base created (dry run)\n"
	if r := command(t, "policy", "apply", "-f", web, "-f", base, "--tenant", "blue", "--dry-run"); r.stdout != dry {
		t.Errorf("dry run: %+v, want stdout %q", r, dry)
	}
	if v := ask[[]policyView](t, "policy", "list"); len(v) != 0 {
		t.Errorf("policies after a dry run: %+v, want none", v)
	}
	prints(t, "networkpolicy/shop/web created\n", "policy", "apply", "-f", web, "--tenant", "blue")
	if code, out, err := run(t,
		strings.Replace(webPolicy, "podSelector: {}", "namespaceSelector: {}", 1)+"---\n"+basePolicy, "policy", "apply",
		"-f", "-", "--tenant", "blue"); code != ExitDone ||
		out != "networkpolicy/shop/web configured\nclusternetworkpolicy/base created\n" {
		t.Errorf("apply of two documents: exit %d, stdout %s, stderr %s; want one configured, one created",
			code, out, err)
	}
	if v := ask[[]policyView](t, "policy", "apply", "-f", base, "--tenant", "blue"); len(v) != 1 ||
		v[0].Change != "unchanged" ||
		v[0].Tenant != "blue" ||
		!v[0].Audit ||
		v[0].DryRun {
		t.Errorf("apply of base again: %+v, want it unchanged", v)
	}

	for _, c := range []struct {
		code       int
		says, args string
	}{
		{ExitUsage, "required flag", "policy apply -f " + web},
		{ExitUsage, "required flag", "policy apply --tenant blue"},
		{ExitUsage, "nothing was changed", "policy apply --tenant blue -f " + dir + "/none"},
		{ExitUsage, "no document", "policy apply --tenant blue -f " + file("empty.yaml", "# nothing\n---\n")},
		{ExitUsage, "pod.yaml, document 1: ", "policy apply --tenant blue -f " + web + " -f " +
			file("pod.yaml", "kind: Pod")},
		{ExitUsage, "two.yaml, document 2: ", "policy apply --tenant blue -f " + web + " -f " +
			file("two.yaml", basePolicy+"---\nkind: Pod") + " -f " + base},
		{ExitUsage, ": document 2: ", "policy apply --tenant blue -f " + file("one.yaml", basePolicy+"---\nkind: Pod")},
		{ExitUsage, "web.yaml, document 1: networkpolicy/shop/web is there twice, first in " + dir +
			"/two.yaml, document 2;", "policy apply --tenant blue -f " + base + " -f " +
			file("two.yaml", "kind: List\napiVersion: v1\nitems: []\n---\n"+webPolicy) + " -f " + web},
		{ExitUsage, "tenant name", "policy apply --tenant Blue -f " + web},
		{ExitUsage, "it is empty", "policy apply --tenant= -f " + web},
		{ExitFailed, `no tenant "green"`, "policy apply --tenant green -f " + web},
		{ExitFailed, `no tenant "green"`, "policy list --tenant green"},
		{ExitUsage, "use text or json", "policy list -o yaml"},
		{ExitUsage, "use text or json or yaml", "policy get netpol/shop/web --tenant blue -o xml"},
		{ExitUsage, "is not a policy name", "policy get web --tenant blue"},
		{ExitUsage, "is not a policy name", "policy get cnp/shop/base --tenant blue"},
		{ExitUsage, "required flag", "policy get netpol/shop/web"},
		{ExitUsage, "wrong number of arguments", "policy get --tenant blue"},
		{ExitFailed, "no policy networkpolicy/default/web", "policy get netpol/web --tenant blue"},
		{ExitFailed, "no policy", "policy get netpol/shop/web --tenant red"},
		{ExitUsage, "name the policies, or use -f with the files", "policy delete --tenant blue"},
		{ExitUsage, "name the policies, or use -f with the files", "policy delete cnp/base --tenant blue -f " + web},
		{ExitUsage, "name the policies, or use -f with the files", "policy delete cnp/base --tenant blue --all"},
		{ExitUsage, "is not a policy name", "policy delete base --tenant blue"},
		{ExitFailed, "no policy clusternetworkpolicy/none; nothing was changed", "policy delete cnp/base cnp/none " +
			"--tenant blue"},
	} {
		refused(t, c.code, c.says, strings.Fields(c.args)...)
	}

	listed := ask[[]policyView](t, "policy", "list", "--tenant", "blue")
	if len(listed) != 2 || listed[0].Name != "base" || listed[1].Namespace != "shop" || listed[1].Rules != 1 ||
		listed[1].Changed == nil ||
		listed[1].Revision <= 0 {
		t.Fatalf("policy list: %+v, want base and shop/web", listed)
	}
	want := "TENANT   NAME                        MODE      RULES   CHANGED\n" +
		"blue     clusternetworkpolicy/base   audit     0       " + moment(*listed[0].Changed) + "\n" +
		"blue     networkpolicy/shop/web      enforce   1       " + moment(*listed[1].Changed) + "\n"
	if r := command(t, "policy", "list"); r.stdout != want {
		t.Errorf("listed\n%swant\n%s", r.stdout, want)
	}
	if r := command(t, "policy", "get", "netpol/shop/web", "--tenant", "blue"); !strings.HasPrefix(
		r.stdout,
		"tenant      blue\nkind        NetworkPolicy\nnamespace   shop\nname        web\nmode        enforce\n",
	) ||
		!strings.Contains(r.stdout, "\n\napiVersion: networking.k8s.io/v1\n") {
		t.Errorf("policy get: %+v, want fields and document of shop/web", r)
	}
	for _, format := range []string{"yaml", "json"} { // the output can be applied again, also to another tenant
		r := command(t, "policy", "get", "networkpolicy/shop/web", "--tenant", "blue", "-o", format)
		if !strings.Contains(r.stdout, "namespaceSelector") {
			t.Errorf("policy get -o %s: %s, want a namespaceSelector", format, r.stdout)
		}
		for tenant, change := range map[string]string{"blue": "unchanged", "red": "created (dry run)"} {
			args := []string{"policy", "apply", "-f", "-", "--tenant", tenant}
			if tenant == "red" {
				args = append(args, "--dry-run")
			}
			if code, out, err := run(t, r.stdout, args...); code != ExitDone ||
				out != "networkpolicy/shop/web "+change+"\n" {
				t.Errorf("%s applied to %s: exit %d, stdout %s, stderr %s; want it %s",
					format, tenant, code, out, err, change)
			}
		}
	}
	for line, says := range map[string]string{
		"policy get --tenant blue":                             "clusternetworkpolicy/base\nnetworkpolicy/shop/web\n:",
		"policy delete --tenant blue networkpolicy/shop/web":   "clusternetworkpolicy/base\n:",
		"policy apply --tenant":                                "blue\nred\n",
		"policy get netpol/shop/web --tenant blue -o":          "text\njson\nyaml\n",
		"policy get clusternetworkpolicy/base --tenant blue":   ":",
		"policy list --tenant":                                 "blue\nred\n",
		"policy apply --tenant blue -f web.yaml nothing-fits ": ":",
	} {
		if r := command(t, append(append([]string{"__complete"}, strings.Fields(line)...), "")...); !strings.HasPrefix(
			r.stdout,
			says,
		) {
			t.Errorf("%s <TAB>: %q, want prefix %q", line, r.stdout, says)
		}
	}

	prints(t, "networkpolicy/shop/web deleted\n", "policy", "delete", "-f", web, "--tenant", "blue")
	if v := ask[[]goneView](t, "policy", "delete", "cnp/base", "--tenant", "blue"); len(v) != 1 ||
		v[0] != (goneView{"blue", "ClusterNetworkPolicy", "", "base"}) {
		t.Errorf("policy delete: %+v, want base", v)
	}
	if v := ask[[]policyView](t, "policy", "list"); len(v) != 0 {
		t.Errorf("policies after the deletion: %+v, want none", v)
	}
	prints(t, "tenant blue has no policies\n", "policy", "delete", "--all", "--tenant", "blue")
	command(t, "policy", "apply", "-f", web, "-f", base, "--tenant", "blue")
	for _, flags := range [][]string{{"--prune", "--dry-run"}, {"--prune"}} {
		dry := ""
		if len(flags) == 2 {
			dry = " (dry run)"
		}
		prints(t, "networkpolicy/shop/web unchanged"+dry+"\nclusternetworkpolicy/base deleted"+dry+"\n",
			append([]string{"policy", "apply", "-f", web, "--tenant", "blue"}, flags...)...)
	}
	if v := ask[[]policyView](t, "policy", "list"); len(v) != 1 || v[0].Name != "web" {
		t.Errorf("policies after apply --prune: %+v, want web", v)
	}
	prints(t, "networkpolicy/shop/web deleted\n", "policy", "delete", "--all", "--tenant", "blue")
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", "/nonexistent")
	for _, line := range []string{"policy list", "policy apply --tenant blue -f " + web,
		"policy get netpol/shop/web --tenant blue", "policy delete netpol/shop/web --tenant blue"} {
		refused(t, ExitUnreachable, "/nonexistent", strings.Fields(line)...)
	}
}

func TestPolicyHits(t *testing.T) {
	socket := serve(t, &fakeAgent{})
	want := "TENANT   MODE      PACKETS   RULE\n" +
		"blue     enforce   1,234     NetworkPolicy shop/web isolates in ingress, and no rule accepts\n" +
		"blue     audit     7         ClusterNetworkPolicy base egress[0] \"out\"\n"
	if code, out, err := run(t, "", "policy", "hits", "--agent-socket", socket); code != ExitDone || out != want ||
		err != "" {
		t.Errorf("exit %d, stdout\n%sstderr %q, want\n%s", code, out, err, want)
	}
	if _, out, _ := run(t, "", "policy", "hits", "--tenant", "red", "-o", "json", "--agent-socket",
		socket); out != "[]\n" {
		t.Errorf("hits of a tenant without any: %q, want []", out)
	}
}

func TestEndpointLabel(t *testing.T) {
	socket := serve(t, &fakeAgent{})
	if code, out, err := run(t, "", "endpoint", "label", "default/web-0", "tier=front", "app-", "--agent-socket",
		socket); code != ExitDone ||
		out != "endpoint 3 default/web-0: app 5, tier=front\n" {
		t.Errorf("endpoint label: exit %d, stdout %s, stderr %s; want app 5, tier=front", code, out, err)
	}
	for _, args := range [][]string{{"3"}, {"3", "tier"}, {"3", "-"}, {"3", "a=b", "a=c"}} {
		if code, out, _ := run(t, "",
			append([]string{"endpoint", "label", "--agent-socket", socket}, args...)...); code != ExitUsage ||
			out != "" {
			t.Errorf("endpoint label %v: exit %d, stdout %s; want exit %d and no output", args, code, out, ExitUsage)
		}
	}
}

func TestEndpointSet(t *testing.T) {
	socket := serve(t, &fakeAgent{})
	for arg, want := range map[string]string{
		"--ready=false":       "not ready",
		"--ready":             "ready",
		"--terminating":       "ready, terminating",
		"--terminating=false": "ready",
	} {
		code, out, errs := run(t, "", "endpoint", "set", "default/web-0", arg, "--agent-socket", socket)
		if code != ExitDone || out != "endpoint 3 default/web-0: "+want+"\n" {
			t.Errorf("endpoint set %s: exit %d, stdout %s, stderr %s; want %s", arg, code, out, errs, want)
		}
	}
	if code, _, errs := run(t, "", "endpoint", "set", "3", "--agent-socket", socket); code != ExitUsage ||
		!strings.Contains(errs, "nothing to set") {
		t.Errorf("endpoint set without a condition: exit %d, stderr %s", code, errs)
	}
}

func TestPolicyNamed(t *testing.T) {
	for text, want := range map[string]string{
		"shop/web":                      "NetworkPolicy shop web",
		"netpol/shop/web":               "NetworkPolicy shop web",
		"networkpolicy/web":             "NetworkPolicy default web",
		"netpol/web":                    "NetworkPolicy default web",
		"cnp/base":                      "ClusterNetworkPolicy  base",
		"web":                           "",
		"shop/":                         "",
		"/web":                          "",
		"cnp/shop/base":                 "",
		"netpol/shop/web/x":             "",
		"clusternetworkpolicy/shop/web": "",
	} {
		p, err := policyNamed(text)
		got := ""
		if err == nil {
			got = p.Kind + " " + p.Namespace + " " + p.Name
		}
		if got != want {
			t.Errorf("%q: got %q, %v, want %q", text, got, err, want)
		}
	}
}
