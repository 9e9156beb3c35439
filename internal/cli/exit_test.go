package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestExitCodesOfFamilies: all families of commands use the same exit codes. The code is 2 if the command line is
// invalid in every cluster, 1 if the state of the cluster does not permit the command, and 3 if the daemon does not
// respond.
func TestExitCodesOfFamilies(t *testing.T) {
	west, westEdge := startRegion(t, "west", "fd70:696c:6100::/40")
	west()
	westEdge()
	for _, line := range []string{"green --network nimitz --cidr fd12:3456::/48", "lime --network nimitz --cidr " +
		"10.0.0.0/16", "blue"} {
		if r := command(t, append([]string{"tenant", "create"}, strings.Fields(line)...)...); r.code != ExitDone {
			t.Fatal(r)
		}
	}
	for _, line := range []string{"underlay service create db --tenant green --virtual fd09::7 --real 2001:db8::9",
		"underlay publication create db --tenant green --container fd12:3456::5 --node e1"} {
		if r := command(t, strings.Fields(line)...); r.code != ExitDone {
			t.Fatal(r)
		}
	}
	dir := t.TempDir()
	file := func(name, base, tenant, cidr string) string {
		path := filepath.Join(dir, strings.NewReplacer("/", "_", ":", "_").Replace(name+base+tenant+cidr))
		text := `{"version":1,"name":"` + name + `","basePrefix":"` + base + `/40","edge":"` + base[:len(base)-1] +
			`1::/64","tenants":[{"name":"` + tenant + `","vni":7,"cidrs":["` + cidr + `"]}]}`
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	east := file("east", "fd70:696c:6200::", "green", "fd13::/48")
	const service, publication = "--virtual fd09::8 --real 2001:db8::a", "--container fd12:3456::6 --node e1"
	for code, lines := range map[int][]string{
		ExitUsage: {
			// Invalid names.
			"tenant create Green --network nimitz --cidr 10.0.0.0/16", "tenant get Green", "tenant delete Green",
			"tenant migrate Green --to netpila", "tenant migrate Green --finish", "tenant rotate-key Green",
			"underlay service create Db --tenant green " + service,
			"underlay service create x --tenant Green " + service, "underlay service delete Db --tenant green",
			"underlay service delete db --tenant Green", "underlay service list --tenant Green",
			"underlay publication create Db --tenant green " + publication,
			"underlay publication create x --tenant Green " + publication,
			"underlay publication delete Db --tenant green", "underlay publication delete db --tenant Green",
			"underlay publication list --tenant Green",
			"region import " + file("East", "fd70:696c:6200::", "green", "fd13::/48"), "region import " +
				file("east", "fd70:696c:6200::", "Green", "fd13::/48"), "region import " + east + " --tenant Green",
			"region delete East",
			"offload start Green --node e1", "offload stop Green --node e1", "offload list --tenant Green",
			"offload get Green --node e1", "offload start green --node= --frontends 1",
			"offload start green --node e1 --frontends 3",
			// Empty values, for example of unset variables of a script.
			"tenant create red --network nimitz --cidr=", "underlay service list --tenant=",
			"underlay service create x --tenant= " + service, "underlay service delete db --tenant=",
			"underlay publication list --tenant=",
			"underlay publication create x --tenant green --container fd12:3456::6 --node=",
			"region import " + east + " --tenant=", "bench nic --figure=", "bench nic --matrix=",
			"bench nic --matrix " + east + " --job=", "bench nic --record=", "bench nic --record " + dir +
				"/m --ovs-run-dir=",
			"bench entries --nodes=", "bench entries --switches=", "bench flow-delete --installed=",
			// Invalid values and combinations of flags.
			"tenant create red --network vlan", "tenant create red --network nimitz", "tenant create red --network " +
				"nimitz --cidr x", "tenant create red --network nimitz --cidr 10.0.0.0/16 --node-bits x",
			"tenant create red --network nimitz --cidr 10.0.0.0/16 --node-bits 16",
			"tenant create red --network nimitz --cidr 100.64.0.0/16", "tenant migrate green",
			"tenant migrate green --to vlan", "tenant migrate green --finish --addressing clear",
			"tenant migrate green --to netpila --wait -1s", "tenant rotate-key blue --wait -1s",
			"tenant migrate green --to netpila --wait x",
			"underlay service create x --tenant green --virtual x --real 2001:db8::a",
			"underlay service create x --tenant green --virtual fd09::8 --real 10.0.0.1",
			"underlay service create x --tenant green --virtual fd12:3456::9 --real 2001:db8::a",
			"underlay service create x --tenant green --virtual ff02::1 --real 2001:db8::a",
			"underlay publication create x --tenant green --container x --node e1",
			"underlay publication create x --tenant green --container fd99::1 --node e1",
			"region import " + dir + "/none", "region import " + dir, "region import " +
				file("east", "fe80::", "green", "fd13::/48"), "region import " +
				file("east", "fd70:696c:6200::", "green", "x"),
			"bench nic --figure 9", "bench nic --seed -1", "bench nic --for 3s", "bench nic -o xml",
			"bench nic --matrix " + east, "bench nic --matrix " + dir + "/none", "bench nic --record " + dir +
				"/none/m", "bench nic -o /proc/none",
			"bench entries --nodes 1", "bench entries --nodes x", "bench entries --switches vpp",
			"bench entries --quick --full", "bench entries -o /proc/none",
			"bench flow-delete --installed 1", "bench flow-delete --installed x", "bench flow-delete --quick --full",
			"bench flow-delete -o /proc/none",
			// Too many or too few arguments.
			"tenant create", "tenant migrate", "underlay service create " + service, "underlay service delete",
			"underlay service list x", "underlay publication delete", "underlay publication list x", "region export x",
			"region import", "region delete",
			"region list x", "bench nic x", "bench entries x", "bench flow-delete x",
		},
		ExitFailed: {
			// Objects that do not exist.
			"tenant get none", "tenant migrate none --to netpila", "tenant migrate none --finish",
			"underlay service create x --tenant none " + service, "underlay service delete none --tenant green",
			"underlay service list --tenant none", "underlay publication create x --tenant none " + publication,
			"underlay publication create x --tenant green --container fd12:3456::6 --node none",
			"underlay publication delete none --tenant green", "underlay publication list --tenant none",
			"region delete none", "region import " + east + " --tenant none", "bench nic --record " + dir +
				"/m --ovs-run-dir " + dir + "/none",
			"offload start none --node e1", "offload stop green --node e1", "offload get green --node e1",
			"offload list --tenant none",
			// Objects that exist already or are in another state.
			"offload start blue --node e1", "offload start green --node e1 --frontends 1",
			"tenant create green --network nimitz --cidr 10.0.0.0/16", "tenant migrate blue --to netpila",
			"tenant migrate green --finish",
			"underlay service create db --tenant green " + service,
			"underlay service create x --tenant green --virtual fd09::7 --real 2001:db8::a",
			"underlay service create x --tenant blue " + service, "underlay service create x --tenant lime " + service,
			"underlay publication create db --tenant green " + publication,
			"underlay publication create x --tenant green --container fd12:3456::5 --node e1",
			"underlay publication create x --tenant blue " + publication,
			"underlay publication create x --tenant lime " + publication,
			"region import " + file("east", "fd70:696c:6100::", "green", "fd13::/48"), "region import " +
				file("east", "fd70:696c:6200::", "green", "fd12:3456::/56"), "bench nic --record " + east,
		},
	} {
		for _, line := range lines {
			refused(t, code, "", strings.Fields(line)...)
		}
	}
	if r := command(t, "region", "list"); strings.Contains(r.stdout, "east") {
		t.Errorf("region list shows a rejected region: %s", r.stdout)
	}
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", filepath.Join(dir, "none"))
	for _, line := range []string{
		"tenant create red --network nimitz --cidr 10.0.0.0/16", "tenant migrate green --to netpila",
		"tenant migrate green --finish", "underlay service create x --tenant green " + service, "underlay service list",
		"underlay service delete db --tenant green",
		"underlay publication create x --tenant green " + publication, "underlay publication list",
		"underlay publication delete db --tenant green", "region export", "region import " + east, "region list",
		"region delete east",
	} {
		refused(t, ExitUnreachable, "", strings.Fields(line)...)
	}
}
