package bpfobj

// Folders of pins.
const (
	MapsFolder  = "maps"
	LinksFolder = "links"
)

// Pin names. Other builds find the maps by these names, whatever the programs call them; they also begin the names that
// the kernel shows. A changed layout gets a new name with a higher version.
const (
	PinSources        = "pil_sources_v2"
	PinLocals         = "pil_locals_v1"
	PinTenants        = "pil_tenants_v2"
	PinKeys           = "pil_keys_v1"
	PinPorts          = "pil_ports_v1"
	PinMacs           = "pil_macs_v1"
	PinNetworks       = "pil_networks_v1"
	PinUplinks        = "pil_uplinks_v1"
	PinNimNode        = "nim_node_v1"
	PinNimPeers       = "nim_peers_v1"
	PinNimSenders     = "nim_senders_v1"
	PinNimForeign     = "nim_foreign_v1"
	PinNimOutside     = "nim_outside_v1"
	PinNimDnat        = "nim_dnat_v1"
	PinNimSnat        = "nim_snat_v1"
	PinNimForward     = "nim_forward_v1"
	PinNimOffloads    = "nim_offloads_v1"
	PinNimBackends    = "nim_backends_v1"
	PinNimFronted     = "nim_fronted_v1"
	PinNimSent        = "nim_sent_v2"
	PinNimProbes      = "nim_probes_v2"
	PinNimSharing     = "nim_sharing_v1"
	PinGeneration     = "pil_generation_v1"
	PinDrops          = "pil_drops_v1"
	PinEvents         = "pil_events_v2"
	PinPolSubjects    = "pol_subjects_v1"
	PinPolApps        = "pol_apps_v1"
	PinPolBlocks      = "pol_blocks_v1"
	PinPolPorts       = "pol_ports_v1"
	PinPolRanges      = "pol_ranges_v1"
	PinPolOverrides   = "pol_overrides_v1"
	PinPolHits        = "pol_hits_v1"
	PinPolGeneration  = "pol_generation_v1"
	PinPolAdoptions   = "pol_adoptions_v1"
	PinSessions       = "pil_sessions_v1"
	PinSessionCounts  = "pil_session_counts_v1"
	PinSessionUsers   = "pil_session_users_v1"
	PinSessionTenants = "pil_session_tenants_v1"
)
