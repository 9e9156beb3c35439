package datapath

import (
	"slices"
	"testing"
)

// TestPinNames: the pins keep the names by which other builds find them.
func TestPinNames(t *testing.T) {
	var got []string
	for _, table := range (&Datapath{}).pinnedMaps() {
		got = append(got, table.name)
	}
	slices.Sort(got)
	want := []string{
		"nim_backends_v1", "nim_dnat_v1", "nim_foreign_v1", "nim_forward_v1", "nim_fronted_v1", "nim_node_v1",
		"nim_offloads_v1", "nim_outside_v1", "nim_peers_v1", "nim_probes_v2", "nim_senders_v1", "nim_sent_v2",
		"nim_sharing_v1", "nim_snat_v1",
		"pil_access_v1", "pil_drops_v1", "pil_elocals_v1", "pil_esources_v1", "pil_events_v2",
		"pil_exconns_v1", "pil_exposed_v1", "pil_extargets_v1", "pil_generation_v1", "pil_gwnat_v1",
		"pil_gwsilent_v1", "pil_gwtenants_v1", "pil_keys_v1", "pil_locals_v1", "pil_macs_v1", "pil_maglev_v1",
		"pil_networks_v1", "pil_ports_v1", "pil_services_v1", "pil_session_counts_v1", "pil_session_tenants_v1",
		"pil_session_users_v1", "pil_sessions_v1", "pil_sources_v2",
		"pil_svc_v1", "pil_svcbacks_v1", "pil_svcclients_v1", "pil_svcfronts_v1", "pil_svcnetns_v1", "pil_svcpairs_v1",
		"pil_svcpeers_v1", "pil_svcsets_v1", "pil_svcsockets_v1", "pil_svcudp_v1", "pil_tenants_v2", "pil_uplinks_v1",
		"pol_adoptions_v1", "pol_apps_v1", "pol_blocks_v1", "pol_generation_v1", "pol_hits_v1", "pol_overrides_v1",
		"pol_ports_v1", "pol_ranges_v1", "pol_subjects_v1",
	}
	if !slices.Equal(got, want) {
		t.Errorf("the pins are\n%q, not\n%q", got, want)
	}
}
