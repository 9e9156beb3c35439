// Package datapath drives the packet path in the kernel: it loads the eBPF programs of bpf/, keeps
// their maps and links pinned, makes the device pairs of endpoints and the containers' side of
// them, and reads back what the kernel holds and counts. It owns every hook; nobody else attaches
// anything to the uplink.
//
// What it leaves in the kernel works without it: closing a Datapath, or killing the agent that
// holds it, stops nothing.
package datapath

//go:generate go tool bpf2go -no-global-types -cc clang-16 -strip llvm-strip-16 -target bpfel -type addr -type drop_event -type drop_state -type flow_key -type flow -type ep_src -type ep_dst -type tenant -type key_request -type dev_ep -type peer_key -type sender_key -type sender -type remote_sender_key -type remote_sender -type scoped_prefix -type scoped_addr -type translation -type route -type nimitz_node -type pol_target_key -type pol_target -type app_key -type app_rules -type cidr_key -type cidr_rules -type rule_verdict -type port_key -type port_rules -type range_key -type range_rules -type session_key -type session_state -type session -type session_bucket -type session_counts -type pre_actions -type flow_tuple -type why_request -type pkt_info -type ct_result -type action_request -type verdict -type fragment_key -type ct_ctx -go-package datapath pilaster ../../bpf/pilaster.bpf.c -- -I../../bpf -O2 -g -Wall -Werror -mcpu=v3
