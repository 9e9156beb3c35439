// Package paper plots figures 7, 9 to 12 and 16 to 18 and table 1 of the NETPILA and NIMITZ paper again, with results
// from one machine and the values of the paper's text (NM4, NM7, NM8, NM9, NP9, NP10).
//
//	Form     the sizes of the measurements
//	Draw     measures what the chosen figures need, each measurement once, and creates them
//	Figure   data, with a description of the measurement and of its differences from the paper's
//	Folder   figures as JSON and TSV, and the page of all figures in the folder
//
// The package itself measures nothing: package sim simulates clusters, package nic models the offloading, and package
// bench measures switches and packets. All values of the paper come from its text, with the section, and never from its
// plots.
package paper
